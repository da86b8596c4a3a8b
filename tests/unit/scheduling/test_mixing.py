"""Contexts that are cheaper beside those that run, decided by the kernel's costs alone."""

from alignedserve.costmodel.attention_kernel import AttentionKernel
from alignedserve.costmodel.choice import WorkerSpec, make_cost_model
from alignedserve.scheduling.decode_costs import is_mixing_cheaper
from alignedserve.scheduling.policy import DeviceMemory
from alignedserve.scheduling.scheduler_state import Progress, SchedulerState
from tests.support.marks import each
from tests.support.samples import request


class Decodes:
    """Forty decodes of about 500 tokens on an H100."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.costs = make_cost_model("roofline", WorkerSpec("opt-6.7b", "h100", kernel=kernel))
        self.state = SchedulerState(DeviceMemory(4000, 4000, 16))
        for number in range(40):
            self.add(f"r{number}", 480 + number)

    def add(self, name: str, prompt_len: int) -> None:
        self.state.hold(num_blocks := -(-prompt_len // 16))
        progress = Progress(8.0, 1, prompt_len, num_blocks, 0.0, 0.0)
        self.state.attach(request(name, prompt_len=prompt_len), 0.0, progress)

    def is_mixing_cheaper(self, context_lens: list[int]) -> bool:
        return is_mixing_cheaper(self.state.table, self.costs, context_lens)


@each("context_len", [50, 500, 8000])
def test_any_length_mixes_where_attention_costs_the_sum(context_len: int) -> None:
    assert Decodes(AttentionKernel.LOAD_BALANCED).is_mixing_cheaper([context_len] * 40)


@each(("context_len", "is_worth"), [(50, False), (500, True), (520, True), (8000, False)])
def test_only_like_lengths_mix_where_the_longest_is_a_straggler(context_len: int, *, is_worth: bool) -> None:
    made = Decodes(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    assert made.is_mixing_cheaper([context_len] * 40) == is_worth


def test_a_batch_with_a_straggler_of_its_own_is_not_added_to_another_one() -> None:
    made = Decodes(AttentionKernel.ONE_BLOCK_PER_SEQUENCE)
    made.add("straggler", 5000)
    assert not made.is_mixing_cheaper([500] * 40)
    assert not made.is_mixing_cheaper([500] * 39 + [5100])
