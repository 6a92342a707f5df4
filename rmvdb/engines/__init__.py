"""Vector stores: Milvus, the process of Milvus Lite, and Faiss in memory for tests; their filters and indexes."""
