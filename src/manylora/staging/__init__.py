"""From a PEFT folder to an engine's own form of it, and from one process to another through shared memory.

Shared by the agent, which does the work, and the engine's workers, which map the result (or do the work themselves
where there is no agent). Knows neither vLLM nor the registry.
"""
