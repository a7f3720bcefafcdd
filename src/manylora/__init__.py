"""manylora: hundreds of LoRA adapters on one base model, inside and around vLLM."""

__version__ = "0.1.0"
