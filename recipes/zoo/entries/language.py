"""Language models of transformers and their relatives, with padded batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.zoo.batches import VOCABULARY, many, pairs, sentences
from recipes.zoo.registry import Case, Scale, entry


def own_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """The loss that a model of transformers computes of its labels."""
    loss: Tensor = model(**batch).loss
    return loss


def own_output(model: Any, batch: dict[str, Any]) -> Tensor:
    """What such a model predicts without labels."""
    found: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
    return found


def widths(scale: Scale) -> dict[str, int]:
    """The names that most configurations use."""
    hidden, layers = scale.pick((32, 2), (256, 12))
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * hidden,
        "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    }  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text model of transformers: its configuration's class, its model's, its labels, and what it names otherwise."""

    config: str
    model: str
    labels: str
    rename: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    core: bool = False

    def make(self, scale: Scale) -> Case:
        """Build the model from its configuration."""
        import transformers

        named = {self.rename.get(key, key): value for key, value in widths(scale).items()}
        extra = {key: value(scale) if callable(value) else value for key, value in self.extra.items()}
        options = {key: value for key, value in {**named, **extra}.items() if key}
        config = getattr(transformers, self.config)(**options)
        batches = many(lambda: pairs(scale) if self.labels == "pair" else sentences(scale, self.labels))
        predict = None if self.labels == "pair" else own_output
        return Case(getattr(transformers, self.model)(config), batches, own_loss, predict=predict)


_GPT2 = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
}  # fmt: skip
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
_T5 = {
    "hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff", "max_position_embeddings": "",
}  # fmt: skip
_BART = {
    "hidden_size": "d_model", "num_hidden_layers": "encoder_layers", "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}  # fmt: skip
_DISTIL = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}  # fmt: skip
_CLASSES: dict[str, Any] = {"num_labels": 4}
_SMALL: dict[str, Any] = {**_CLASSES, "embedding_size": 32}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _half(scale: Scale) -> int:
    return scale.pick(2, 6)


_HEADS: dict[str, Any] = {**_GROUPED, "head_dim": lambda scale: scale.pick(8, 64)}


_SEQ2SEQ: dict[str, Any] = {
    "encoder_layers": _half, "decoder_layers": _half, "decoder_attention_heads": 4, "use_cache": False,
    "decoder_ffn_dim": lambda scale: scale.pick(128, 1024), **_SPECIAL,
    "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip

TEXTS = {
    "bert": Text("BertConfig", "BertForSequenceClassification", "class", extra=_CLASSES, core=True),
    "bert_mlm": Text("BertConfig", "BertForMaskedLM", "masked"),
    "bert_qa": Text("BertConfig", "BertForQuestionAnswering", "span"),
    "bert_tokens": Text("BertConfig", "BertForTokenClassification", "token", extra=_CLASSES),
    "roberta": Text(
        "RobertaConfig", "RobertaForSequenceClassification", "class", extra={**_CLASSES, "pad_token_id": 0}, core=True
    ),
    "distilbert": Text(
        "DistilBertConfig", "DistilBertForSequenceClassification", "class", _DISTIL, {"num_labels": 4}, core=True
    ),
    "albert": Text("AlbertConfig", "AlbertForSequenceClassification", "class", extra=_SMALL),
    "electra": Text("ElectraConfig", "ElectraForSequenceClassification", "class", extra=_SMALL),
    "deberta": Text(
        "DebertaV2Config", "DebertaV2ForSequenceClassification", "class", extra=_CLASSES
    ),
    "modernbert": Text(
        "ModernBertConfig", "ModernBertForSequenceClassification", "class",
        extra={**_CLASSES, **_SPECIAL, "cls_token_id": 1, "sep_token_id": 2},
        core=True,
    ),
    "gpt2": Text("GPT2Config", "GPT2LMHeadModel", "next", _GPT2, {"use_cache": False}, core=True),
    "gpt_neox": Text("GPTNeoXConfig", "GPTNeoXForCausalLM", "next", extra={"use_cache": False}),
    "opt": Text("OPTConfig", "OPTForCausalLM", "next", {"intermediate_size": "ffn_dim"}, {
        "use_cache": False, "word_embed_proj_dim": lambda scale: scale.pick(32, 256)}),
    "llama": Text("LlamaConfig", "LlamaForCausalLM", "next", extra=_GROUPED, core=True),
    "llama_classes": Text("LlamaConfig", "LlamaForSequenceClassification", "class", extra={**_GROUPED, **_CLASSES}),
    "mistral": Text("MistralConfig", "MistralForCausalLM", "next", extra={**_GROUPED, "sliding_window": 16}, core=True),
    "qwen2": Text("Qwen2Config", "Qwen2ForCausalLM", "next", extra=_GROUPED),
    "qwen3": Text("Qwen3Config", "Qwen3ForCausalLM", "next", extra=_HEADS, core=True),
    "gemma": Text("GemmaConfig", "GemmaForCausalLM", "next", extra=_HEADS, core=True),
    "phi3": Text("Phi3Config", "Phi3ForCausalLM", "next", extra=_GROUPED),
    "mixtral": Text(
        "MixtralConfig", "MixtralForCausalLM", "next", extra={**_GROUPED, "num_local_experts": 4}, core=True
    ),
    "mamba": Text("MambaConfig", "MambaForCausalLM", "next", {
        "num_attention_heads": "", "max_position_embeddings": ""}, {
        "use_cache": False, "state_size": 8, "num_hidden_layers": 2}, core=True),
    "t5": Text("T5Config", "T5ForConditionalGeneration", "pair", _T5, {
        "use_cache": False, "d_kv": lambda scale: scale.pick(8, 64), "decoder_start_token_id": 0,
        "num_layers": _half}, core=True),
    "bart": Text("BartConfig", "BartForConditionalGeneration", "pair", _BART, _SEQ2SEQ, core=True),
    "marian": Text("MarianConfig", "MarianMTModel", "pair", _BART, _SEQ2SEQ),
}  # fmt: skip

for _name, _text in TEXTS.items():
    entry(f"language/{_name}", "transformers", core=_text.core)(_text.make)


@entry("language/lora_gpt2", "transformers", "peft", core=True)
def lora(scale: Scale) -> Case:
    """GPT-2 with low-rank adapters."""
    from peft import LoraConfig, get_peft_model

    case = TEXTS["gpt2"].make(scale)
    config = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    return Case(get_peft_model(case.model, config), case.batches, own_loss, predict=own_output)


@entry("language/lora_llama", "transformers", "peft")
def lora_llama(scale: Scale) -> Case:
    """Llama with low-rank adapters on all projections, dropout among them."""
    from peft import LoraConfig, get_peft_model

    case = TEXTS["llama"].make(scale)
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    return Case(get_peft_model(case.model, config), case.batches, own_loss, predict=own_output)


@entry("language/sentence_encoder", "transformers", "sentence-transformers", core=True)
def sentence_encoder(scale: Scale) -> Case:
    """Sentence pairs, mean pooling over what is not padding, and in-batch negatives."""
    from sentence_transformers.models import Pooling
    from transformers import BertConfig, BertModel

    encoder = BertModel(BertConfig(**widths(scale)), add_pooling_layer=False)
    pooling = Pooling(widths(scale)["hidden_size"], pooling_mode="mean")

    def embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
        tokens = model[0](**batch).last_hidden_state
        pooled: Tensor = model[1]({"token_embeddings": tokens, "attention_mask": batch["attention_mask"]})[
            "sentence_embedding"
        ]
        return F.normalize(pooled, dim=-1)

    def loss(model: Any, batch: dict[str, dict[str, Tensor]]) -> Tensor:
        left, right = embed(model, batch["anchor"]), embed(model, batch["positive"])
        scores = 20 * left @ right.T
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    side = partial(sentences, scale, "none")
    batches = many(lambda: {"anchor": side(), "positive": side()})
    return Case(
        nn.ModuleList([encoder, pooling]), batches, loss, predict=lambda model, batch: embed(model, batch["anchor"])
    )


@entry("language/x_transformers", "x-transformers")
def x_transformers(scale: Scale) -> Case:
    """An autoregressive decoder with rotary positions, which einops rearranges."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    width, depth = scale.pick((32, 2), (256, 6))
    layers = Decoder(dim=width, depth=depth, heads=4, attn_dim_head=width // 4, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=128, attn_layers=layers))
    return Case(model, many(lambda: sentences(scale, "none")["input_ids"]), lambda model, batch: model(batch))


class _Tagger(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(2 * width, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.embed(tokens))
        scores: Tensor = self.head(hidden)
        return scores


def _tag(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@entry("language/lstm", core=True)
def lstm(scale: Scale) -> Case:
    """A tagger of two bidirectional LSTM layers with dropout between them."""
    return Case(_Tagger(scale.pick(16, 128), 0.1), many(lambda: sentences(scale, "token")), _tag)


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int, *, causal: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=causal)
        self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)
        self.causal = causal

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        masked = {"src_key_padding_mask": mask == 0}
        if self.causal:
            shape = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
            masked = {"mask": shape}
        scores: Tensor = self.head(self.body(self.embed(tokens), **masked))
        return scores


def _encode(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@entry("language/torch_encoder")
def torch_encoder(scale: Scale) -> Case:
    """Torch's own encoder with a padding mask."""
    return Case(
        _Encoder(*scale.pick((16, 2), (256, 6)), causal=False), many(lambda: sentences(scale, "token")), _encode
    )


@entry("language/torch_encoder_causal")
def torch_encoder_causal(scale: Scale) -> Case:
    """Torch's own encoder with a causal mask, which it looks at on the host."""
    return Case(_Encoder(*scale.pick((16, 2), (256, 6)), causal=True), many(lambda: sentences(scale, "token")), _encode)


@entry("language/torch_seq2seq")
def torch_seq2seq(scale: Scale) -> Case:
    """Torch's own nn.Transformer, causal by flag."""
    width = scale.pick(16, 128)
    model = nn.ModuleDict({
        "embed": nn.Embedding(VOCABULARY, width),
        "body": nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True),
        "head": nn.Linear(width, VOCABULARY),
    })  # fmt: skip

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        target = batch["labels"].clamp(min=0)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = model["body"](
            model["embed"](batch["input_ids"]), model["embed"](target), tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=batch["attention_mask"] == 0,
        )  # fmt: skip
        return F.cross_entropy(model["head"](hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    return Case(model, many(lambda: pairs(scale)), loss)
