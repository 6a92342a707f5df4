"""The vector stores: Milvus, Milvus Lite's process, and Faiss in memory for tests; filters and indexes as each has them."""
