//! Metrics with vLLM's names, and logging.
