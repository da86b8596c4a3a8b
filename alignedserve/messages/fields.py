"""Field types shared by several messages, with their bounds."""

from typing import Annotated

import msgspec

from alignedserve.core.ids import BatchId

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Attempt = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
TokenIds = tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 31)], ...]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0.0)]
PredictedLen = Annotated[float, msgspec.Meta(ge=0.0)]  # output tokens in all, those already generated included
Embedding = Annotated[bytes, msgspec.Meta(max_length=1 << 18)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


NO_BATCH = BatchId(0)  # of requests that came without a batch
