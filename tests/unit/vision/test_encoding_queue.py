"""Turns of the encoder: a picture that somebody waits for overtakes one of a document, and each is encoded once."""

import threading
from collections.abc import Generator
from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from alignedserve.core.picture import Picture
from alignedserve.runtime.pictures import Turn
from plugins.vision.decoder import PictureError
from plugins.vision.encoding_queue import EncodingQueue


def of(name: str) -> Picture:
    return Picture(name.encode(), bytes(32), ((0, 1),))


class Encoder:
    """Passes of fifty steps; those of `slow` wait before the first for what may go on."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()  # the first step of `slow`
        self.may_go_on = threading.Event()
        self.done: list[str] = []

    def passes(self, picture: Picture) -> list[Generator[None, None, Tensor]]:
        if picture.content == b"bad":
            raise PictureError("broken")
        return [self._steps(picture.content.decode())]

    def _steps(self, name: str) -> Generator[None, None, Tensor]:
        if name == "slow":
            self.has_begun.set()
            self.may_go_on.wait(timeout=10)
        for _ in range(50):
            yield
        self.done.append(name)
        return torch.zeros(1, 2)

    def take_turn(self, turn: Turn, is_real_time: bool) -> "Future[bool]":
        taken: Future[bool] = Future()
        taken.set_result(turn(0.02))
        return taken


def test_a_picture_that_somebody_waits_for_overtakes() -> None:
    encoder = Encoder()
    queue = EncodingQueue(encoder.passes, encoder.take_turn, lambda: True)
    documents = [queue.add(name.encode(), of(name), is_real_time=False) for name in ("slow", "other", "same", "bad")]
    assert encoder.has_begun.wait(timeout=10)  # from here on the thread chooses nothing until `slow` goes on
    chat = queue.add(b"chat", of("chat"), is_real_time=True)
    assert queue.add(b"same", of("same"), is_real_time=True) is documents[2]  # somebody waits for it by now
    encoder.may_go_on.set()
    assert chat.result(timeout=10).shape == (1, 2)
    for one in documents[:3]:
        one.result(timeout=10)
    with pytest.raises(PictureError):
        documents[3].result(timeout=10)
    assert encoder.done == ["same", "chat", "slow", "other"]
    queue.close()
