"""The registry: which adapters exist, whose they are, who may call them, and where their bytes lie.

A synchronous, thread-safe library over an SQL database (the index) and an object store (the bytes). It knows
neither HTTP nor vLLM; the command line, the gateway and the node's agent use it through
`manylora.registry.catalog.Catalog`.
"""
