"""Numbers of `gpu_random.case_of` that take each of `cuda`'s kernels for Hopper."""

from __future__ import annotations

from collections.abc import Mapping

import preset_calls

__all__ = ["KERNELS", "OF_EACH_KERNEL"]

KERNELS: Mapping[str, tuple[int, ...]] = {
    "hopper 64x128, backward hopper": (8, 16, 56, 64, 92, 278, 329),
    "hopper 64x128, backward hopper, dq portable": (7, 83),
    "hopper 64x128, backward hopper, dq and captured portable": (67, 357),
    "hopper 64x64, backward hopper wide": (5, 31, 142),
    "hopper 128x128": (51,),
    "hopper 128x128, backward hopper": (6, 18, 240),
    "hopper 128x128, backward hopper, dq portable": (435,),
    "hopper 128x128, backward hopper wide": (75,),
    "hopper 128x128, backward hopper wide, dq and captured portable": (9,),
    "hopper 128x128, backward portable": (66,),
    "hopper 128x64, backward hopper wide": (15,),
    "hopper 192x128, backward hopper": (36,),
    "hopper 192x128, backward hopper, dq portable": (183,),
    "hopper decode": (1423,),
    "hopper decode, backward hopper": (48, 54),
    "hopper decode, backward hopper, dq portable": (63,),
    "hopper decode, backward portable": (968,),
    "prefill, backward hopper": (4,),
    "prefill, backward portable": (90,),
}
"""Variant in `explain`, without numbers and reasons -> calls. Forward's first number is a tile's
rows, 64 for each consumer. dQ is portable under deterministic algorithms (every fourth call), but
not above head dim 128. Captured tensors learn in 6, 9, 56, 67, 240, 278, 329 and 357. Backward's
steps are of 64 rows and of 128, with and without masks. 15 and 75 have columns of two parts. Of
decoding 968 has no mask and a kernel that adds up parts, 1423 a mask for each entry."""

OF_EACH_KERNEL = (
    *preset_calls.NUMBERS,
    *sorted(number for numbers in KERNELS.values() for number in numbers),
)
"""Calls of presets' rows, whose kernels are compiled with other constants. They come first: a
mod's number is a constant until the process has seen another one in its place."""
