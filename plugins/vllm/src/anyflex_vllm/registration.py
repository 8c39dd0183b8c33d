"""Registers anyflex's backend with vLLM."""

from __future__ import annotations

from typing import Any

from anyflex_vllm.versions import check_version

__all__ = ["NAME", "register", "registered"]

NAME = "ANYFLEX"
"""Value of vLLM's `attention_backend` that chooses anyflex."""
BACKEND = "anyflex_vllm.backend.AnyflexBackend"
ON_A_CPU = "anyflex_vllm.cpu_choice.ChosenBackend"


def register() -> None:
    """Make ANYFLEX an attention backend of vLLM, in this process.

    vLLM calls it by the entry point. Registering again changes nothing.

    Raises:
        ArgumentError: an untested version of vLLM, or another plugin that has taken the CPU's
            backend.
    """
    # Here and not above: an untested vLLM may lack these modules, and deserves the first error.
    import vllm

    check_version(vllm.__version__)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    import anyflex

    if NAME in AttentionBackendEnum.__members__:
        return
    cpu = AttentionBackendEnum.CPU_ATTN
    if cpu.is_overridden():
        raise anyflex.ArgumentError(
            f"vLLM's CPU_ATTN is {cpu.get_path()} of another plugin, and must be vLLM's own: "
            "name one of the two plugins in VLLM_PLUGINS"
        )
    register_backend(NAME, BACKEND)
    # vLLM sends its configuration to processes that unpickle it before they load plugins. There
    # a member is looked up by its value, which only registration makes known.
    AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (registered, ())
    # vLLM asks for CPU_ATTN on a CPU, whatever the user has chosen.
    register_backend(cpu, ON_A_CPU)


def registered() -> Any:
    """Return ANYFLEX as a member of vLLM's enumeration of backends, after registering it.

    Raises:
        ArgumentError: as `register`.
    """
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[NAME]
