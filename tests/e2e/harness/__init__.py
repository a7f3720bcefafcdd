"""What the end-to-end tests stand on: a small random model with its adapters, a running stack, and clients.

Nothing in this package imports torch except `build_zoo`, which only ever runs in a process of its own.
"""
