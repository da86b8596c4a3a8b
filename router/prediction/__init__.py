"""The router's length predictors by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from alignedserve.config.sections import RouterConfig
from alignedserve.core.errors import ConfigError
from alignedserve.runtime.model.served_model import ServedModel
from router.prediction.encoders import HashedNgrams, PromptEncoder, TokenEmbeddings
from router.prediction.journal import LearntLengths
from router.prediction.predictor import LengthPredictor, PredictorConfig

CLASS_MEAN = "class_mean"  # no predictor: the mean of recent requests of the same class


def make_length_predictor(config: RouterConfig, served: ServedModel) -> LengthPredictor | None:
    """Return the predictor that `router.length_predictor` names; None for the mean of the class.

    Raises ConfigError listing the valid names or an encoder's needs; ModelError for missing or malformed files.
    """
    name = config.length_predictor
    if name == CLASS_MEAN:
        return None
    if name == "sentence_encoder":
        raise ConfigError(
            "router.length_predictor sentence_encoder is gone: use token_embeddings, which reads the served model's "
            "embeddings, or hashed_ngrams, which needs no model"
        )
    if name not in ENCODERS:
        known = ", ".join(sorted((*ENCODERS, CLASS_MEAN)))
        raise ConfigError(f"router.length_predictor: unknown predictor {name!r}; known: {known}")
    return LengthPredictor(ENCODERS[name](config, served), PredictorConfig(max_bytes=config.max_learnt_bytes))


def learnt_lengths(
    config: RouterConfig, served: ServedModel, predictor: LengthPredictor, folder: Path
) -> LearntLengths:
    encoder = f"{config.length_predictor} {served.name} {served.config.vocab_size}"
    return LearntLengths(folder, encoder=encoder, num_features=predictor.num_features)


def _token_embeddings(config: RouterConfig, served: ServedModel) -> PromptEncoder:
    if served.has_random_weights:
        raise ConfigError("router.length_predictor token_embeddings needs trained weights; model.random_weights is set")
    if served.encoder is not None:
        raise ConfigError("router.length_predictor token_embeddings is for decoders; an encoder writes no answers")
    return TokenEmbeddings.of_model(served.folder, served.decoder.family)


ENCODERS: Mapping[str, Callable[[RouterConfig, ServedModel], PromptEncoder]] = MappingProxyType(
    {"hashed_ngrams": lambda config, served: HashedNgrams(), "token_embeddings": _token_embeddings}
)
