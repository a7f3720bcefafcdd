"""The supervisor: starts the engine and the gateway of one machine, watches them, and leaves no process behind."""
