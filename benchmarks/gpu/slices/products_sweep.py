"""Products with packed weights by tile, warps and stages, for the table `kernels.gpu.grouped_weights.TILINGS`."""

from collections.abc import Iterator
from functools import partial
from itertools import product

from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.grouped_linear import DeviceWeight, GroupedLinear, Numbers, random_weight

_ROWS, _TOY_ROWS = (1, 16, 32, 64, 128, 256), (3,)
_CHOICES = tuple(product((16, 32, 64, 128), (64, 128), (4, 8), (3, 4)))
_FORMS = (Numbers.INT4, Numbers.FLOAT8)
_TOY_CHOICES = ((16, 64, 4, 3), (32, 32, 4, 2))


def tiling_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group for each form, shape of an 8B layer's products and number of rows: every tiling of about as many
    rows, and the product with the weight unpacked first, as it is of more rows."""
    kernels = setup.kernels("grouped_weights")
    if kernels is None:
        return
    config = setup.config
    shapes = (
        ("gate and up", 2 * config.intermediate_size, config.hidden_size),
        ("down", config.hidden_size, config.intermediate_size),
    )
    for form, (name, columns, width), count in product(_FORMS, shapes, _TOY_ROWS if setup.is_toy else _ROWS):
        stored, x = random_weight(form, setup.device, columns, width), setup.randn(count, width)
        weight, unpacked = DeviceWeight(stored, setup.dtype), GroupedLinear(stored, dtype=setup.dtype)
        case = partial(
            KernelCase,
            f"product, {form.value}",
            f"{count} rows, {name}",
            num_bytes=stored.words.nbytes,
            num_operations=2 * count * columns * width,
            is_copy=False,
        )
        choices = [kernels.Tiling(*sizes) for sizes in (_TOY_CHOICES if setup.is_toy else _CHOICES)]
        yield [
            case(f"{TRITON}, {own.rows} x {own.columns}, {own.num_warps} warps, {own.num_stages} stages", run)
            for own in choices
            if count <= 2 * own.rows and own.rows <= max(2 * count, 16)
            for run in [partial(kernels.multiply, x, weight, tiling=own)]
        ] + [case(TORCH + ", unpacked first", partial(_unpacked_first, unpacked, x))]


def _unpacked_first(linear: GroupedLinear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.unpacked())
