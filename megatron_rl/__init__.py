"""megatron_rl: reinforcement learning for Mixture-of-Experts language models. Megatron-Core trains, SGLang samples."""

__version__ = "0.1.0"
