"""What an encoder's pass is reckoned to cost, in prompt tokens."""

from plugins.vision.forms import EncoderWork


def test_patches_cost_alone_and_for_those_that_they_attend_to() -> None:
    assert EncoderWork(4, 0.5, 0.01).num_tokens(25) == 150  # 100 patches: 100 * (0.5 + 100 * 0.01)
    assert EncoderWork(4, 0.5, 0.01, part_patches=50).num_tokens(25) == 100
    assert EncoderWork(4, 0.5, 0.01, part_patches=50).num_tokens(5) == 14
