"""anyflex as an attention implementation of Hugging Face transformers.

    import anyflex_transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="anyflex")

The import registers attention and its masks under one name, for the whole process.
"""

from __future__ import annotations

from anyflex_transformers.continuous_batching import continuous_batching
from anyflex_transformers.registration import NAME, register
from anyflex_transformers.support import supports

__all__ = ["NAME", "continuous_batching", "register", "supports"]

register()
