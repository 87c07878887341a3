"""Speech models: wav2vec 2.0, HuBERT, Whisper, and a recogniser with a CTC loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.zoo.batches import IGNORED, VOCABULARY, many, padding
from recipes.zoo.registry import Case, Scale, entry


def _waves(scale: Scale) -> dict[str, Any]:
    size, length = scale.pick((2, 3200), (8, 16000))
    mask = padding(size, length)
    return {"input_values": torch.randn(size, length) * mask, "attention_mask": mask}


def _wav2vec(scale: Scale) -> dict[str, Any]:
    hidden, layers = scale.pick((32, 2), (256, 8))
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden,
        "conv_dim": (32,) * 4, "conv_kernel": (10, 3, 3, 3), "conv_stride": (5, 4, 4, 2), "num_feat_extract_layers": 4,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0, "vocab_size": 32,
        "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "num_labels": 4, "ctc_zero_infinity": True,
        "classifier_proj_size": 32,
    }  # fmt: skip


def _speech(config: str, model: str, *, ctc: bool) -> Any:
    def make(scale: Scale) -> Case:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**_wav2vec(scale)))

        def batch() -> dict[str, Any]:
            waves = _waves(scale)
            size = len(waves["input_values"])
            if not ctc:
                return {**waves, "labels": torch.randint(4, (size,))}
            return {**waves, "labels": torch.randint(1, 32, (size, 6)).masked_fill(padding(size, 6) == 0, IGNORED)}

        predict = lambda model, batch: model(batch["input_values"], batch["attention_mask"]).logits  # noqa: E731
        return Case(made, many(batch), lambda model, batch: model(**batch).loss, predict=predict)

    return make


_CTC = "the lengths of targets and inputs are read on the host"
entry("speech/wav2vec2", "transformers", core=True)(
    _speech("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", ctc=False)
)
entry("speech/wav2vec2_ctc", "transformers", refused=_CTC)(_speech("Wav2Vec2Config", "Wav2Vec2ForCTC", ctc=True))
entry("speech/hubert", "transformers")(_speech("HubertConfig", "HubertForSequenceClassification", ctc=False))


@entry("speech/whisper", "transformers", core=True)
def whisper(scale: Scale) -> Case:
    """Log-mel frames and padded transcripts; the batch has the transcripts as strings, which the step leaves alone."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    width, layers = scale.pick((32, 2), (256, 4))
    config = WhisperConfig(
        vocab_size=VOCABULARY, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, num_mel_bins=16,
        max_source_positions=50, max_target_positions=64, use_cache=False, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[],
    )  # fmt: skip

    def batch() -> dict[str, Any]:
        size = scale.pick(2, 16)
        labels = torch.randint(3, VOCABULARY, (size, 24)).masked_fill(padding(size, 24) == 0, IGNORED)
        text = [" ".join(map(str, row.tolist())) for row in labels]
        return {"input_features": torch.randn(size, 16, 100), "labels": labels, "text": text}

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = model(input_features=batch["input_features"], labels=batch["labels"]).loss
        return found

    def predict(model: nn.Module, batch: dict[str, Any]) -> Any:
        return model(input_features=batch["input_features"], decoder_input_ids=batch["labels"].clamp(min=0)).logits

    return Case(WhisperForConditionalGeneration(config), many(batch), loss, predict=predict)


class _Recogniser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, width, 5, stride=2, padding=2)
        self.rnn = nn.GRU(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.conv(x).transpose(1, 2).relu())
        scores: Tensor = self.head(hidden)
        return scores


@entry("speech/ctc_gru", refused=_CTC)
def ctc(scale: Scale) -> Case:
    """A GRU recogniser with torch's CTC loss, its lengths as tensors."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        scores = model(batch["features"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, batch["labels"], batch["lengths"], batch["label_lengths"], zero_infinity=True)

    def batch() -> dict[str, Any]:
        size = scale.pick(4, 16)
        return {
            "features": torch.randn(size, 16, 60), "labels": torch.randint(1, 32, (size, 8)),
            "lengths": torch.full((size,), 30), "label_lengths": torch.randint(4, 9, (size,)),
        }  # fmt: skip

    return Case(_Recogniser(scale.pick(16, 128)), many(batch), loss)
