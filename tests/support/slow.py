"""An engine that takes its time: a gRPC server before the real one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc


class _Forwarding(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.Channel, method: str, seconds: float, asked: list[float]) -> None:
        self._channel, self._method, self._seconds, self._asked = channel, method, seconds, asked

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        forward = self._channel.unary_unary(method)

        def call(request: bytes, context: grpc.ServicerContext) -> Any:
            if method.endswith(f"/{self._method}"):
                self._asked.append(time.monotonic())
                time.sleep(self._seconds)
            try:
                return forward(request)
            except grpc.RpcError as exc:
                context.abort(exc.code(), exc.details())

        return grpc.unary_unary_rpc_method_handler(call)


@contextmanager
def slow(place: str, folder: Path, *, method: str, seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Give the engine at `place`, so many `seconds` slower at a method of its gRPC service: where, and when that was asked
    for."""
    asked: list[float] = []
    address = f"unix:{folder}/slow.sock"
    with grpc.insecure_channel(place) as channel, ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads, handlers=[_Forwarding(channel, method, seconds, asked)])
        server.add_insecure_port(address)
        server.start()
        try:
            yield address, asked
        finally:
            server.stop(grace=None).wait()
