"""The node's agent: packs adapters once for all engines of a node, and keeps them in shared memory and on disk."""
