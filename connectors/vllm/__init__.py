"""The vLLM V1 connector. Only this package imports vLLM, and only `adapt` knows its versions."""
