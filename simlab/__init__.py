"""simlab: a trace-driven simulator and policy lab for mixture-of-experts (MoE) expert caches."""

__version__ = "0.1.0"
