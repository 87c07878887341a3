"""Image models of timm, torchvision, transformers, segmentation-models-pytorch, MONAI, lightly and vit-pytorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.zoo.batches import images, many
from recipes.zoo.registry import Case, Scale, entry


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of an image classifier with label smoothing."""
    x, y = batch
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


TIMM: dict[str, tuple[dict[str, Any], int, bool]] = {
    "vit_tiny_patch16_224": ({"img_size": 64}, 64, True),
    "resnet50": ({}, 64, True),
    "resnet18": ({}, 64, False),
    "efficientnet_b0": ({"drop_path_rate": 0.1}, 64, True),
    "convnext_atto": ({"drop_path_rate": 0.1}, 64, True),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "drop_path_rate": 0.1}, 56, True),
    "mixer_s32_224": ({"img_size": 64}, 64, True),
    "mobilenetv3_small_050": ({}, 64, False),
    "regnety_002": ({}, 64, False),
    "deit_tiny_patch16_224": ({"img_size": 64}, 64, False),
    "maxvit_rmlp_pico_rw_256": ({"img_size": 64}, 64, False),
}
"""Name, arguments, side of the image, whether it is in the core."""


def _timm(name: str, options: dict[str, Any], side: int) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        import timm

        model = timm.create_model(name, num_classes=10, **options)
        return Case(model, many(lambda: images(scale, side=side, size=scale.pick(2, 32)), 4), classify)

    return make


for _name, (_options, _side, _core) in TIMM.items():
    entry(f"vision/timm_{_name}", "timm", core=_core)(_timm(_name, _options, _side))


@entry("vision/timm_mixup", "timm")
def timm_mixup(scale: Scale) -> Case:
    """Mixup as its authors wrote it, with numbers of NumPy's and a permutation of the host's; flips by chance."""
    import timm

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        if random.random() < 0.5:
            x = x.flip(3)
        share, order = np.random.beta(1.0, 1.0), torch.randperm(x.size(0)).to(x.device)
        logits = model(share * x + (1 - share) * x[order])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])

    model = timm.create_model("resnet18", num_classes=10)
    return Case(model, many(lambda: images(scale, side=64, size=scale.pick(2, 32)), 4), loss)


TORCHVISION = {"mobilenet_v3_small": True, "densenet121": True, "squeezenet1_1": False, "shufflenet_v2_x0_5": False}


def _torchvision(name: str) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=10)
        return Case(model, many(lambda: images(scale, side=64, size=scale.pick(2, 32)), 4), classify)

    return make


for _name, _core in TORCHVISION.items():
    entry(f"vision/torchvision_{_name}", "torchvision", core=_core)(_torchvision(_name))


@entry("vision/torchvision_deeplab", "torchvision", core=True)
def deeplab(scale: Scale) -> Case:
    """DeepLab v3 with an auxiliary loss; the batch has file names."""
    from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

    model = deeplabv3_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5, aux_loss=True)
    return Case(
        model, many(lambda: masks(scale, 5), 4), lambda model, batch: _with_auxiliary(model(batch["image"]), batch)
    )


def _with_auxiliary(out: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(out["out"], batch["mask"]) + 0.5 * F.cross_entropy(out["aux"], batch["mask"])


_serial = iter(range(1_000_000))


def masks(scale: Scale, classes: int, side: int = 64) -> dict[str, Any]:
    """Images with a mask each, and the names of the files they came from."""
    size = scale.pick(2, 8)
    x, _ = images(scale, side=side, size=size)
    names = [f"scan_{next(_serial):05d}.png" for _ in range(size)]
    return {"image": x, "mask": torch.randint(classes, (size, side, side)), "name": names}


@entry("vision/torchvision_fasterrcnn", "torchvision", refused="the number of proposals depends on the image")
def faster_rcnn(scale: Scale) -> Case:
    """A detector: lists of images and of targets."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        corners = [torch.rand(3, 2) * 30 for _ in range(2)]
        targets = [{"boxes": torch.cat([c, c + 10], 1), "labels": torch.randint(1, 5, (3,))} for c in corners]
        return [torch.rand(3, 64, 64) for _ in range(2)], targets

    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=5, min_size=64, max_size=64
    )
    return Case(model, many(batch, 4), lambda model, batch: sum(model(*batch).values()))


@entry("vision/smp_unet", "segmentation-models-pytorch", core=False)
def smp_unet(scale: Scale) -> Case:
    """A U-Net with a Dice loss of the library's own; the batch has file names."""
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=1)
    dice = smp.losses.DiceLoss("binary", from_logits=True)

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        target = batch["mask"].unsqueeze(1).float()
        found: Tensor = dice(model(batch["image"]), target)
        return found

    return Case(model, many(lambda: masks(scale, 2), 4), loss)


@entry("vision/smp_fpn_focal", "segmentation-models-pytorch")
def smp_fpn(scale: Scale) -> Case:
    """An FPN of several classes, with focal loss and with what its example asserts about the mask."""
    import segmentation_models_pytorch as smp

    model = smp.FPN("timm-mobilenetv3_small_100", encoder_weights=None, classes=4)
    focal = smp.losses.FocalLoss("multiclass")

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        assert batch["mask"].ndim == 3
        assert batch["mask"].max() <= 3
        assert batch["mask"].min() >= 0
        found: Tensor = focal(model(batch["image"]), batch["mask"])
        return found

    return Case(model, many(lambda: masks(scale, 4), 4), loss)


@entry("vision/monai_unet", "monai")
def monai_unet(scale: Scale) -> Case:
    """MONAI's 3-D U-Net with its Dice and cross-entropy loss, and with the metadata of its loaders."""
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    side, size = scale.pick((16, 1), (32, 2))
    model = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2), num_res_units=2, dropout=0.1)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)

    def batch() -> dict[str, Any]:
        affine = torch.eye(4).repeat(size, 1, 1)
        meta = {"filename_or_obj": [f"ct_{next(_serial)}.nii.gz" for _ in range(size)], "affine": affine}
        label = torch.randint(3, (size, 1, side, side, side))
        return {"image": torch.randn(size, 1, side, side, side), "label": label, "image_meta_dict": meta}

    return Case(model, many(batch, 4), lambda model, batch: criterion(model(batch["image"]), batch["label"]))


@entry("vision/monai_unetr", "monai")
def monai_unetr(scale: Scale) -> Case:
    """MONAI's vision transformer for segmentation."""
    from monai.losses import DiceLoss
    from monai.networks.nets import UNETR

    side = 32
    model = UNETR(1, 2, (side, side, side), feature_size=8, hidden_size=48, mlp_dim=96, num_heads=4)
    criterion = DiceLoss(to_onehot_y=True, softmax=True)

    def batch() -> dict[str, Any]:
        return {"image": torch.randn(1, 1, side, side, side), "label": torch.randint(2, (1, 1, side, side, side))}

    return Case(model, many(batch, 4), lambda model, batch: criterion(model(batch["image"]), batch["label"]))


@entry("vision/vit_pytorch", "vit-pytorch")
def vit_pytorch(scale: Scale) -> Case:
    """A vision transformer written with einops."""
    from vit_pytorch import ViT

    width, depth = scale.pick((32, 2), (192, 12))
    model = ViT(
        image_size=64, patch_size=16, num_classes=10, dim=width, depth=depth, heads=4, mlp_dim=4 * width,
        dim_head=width // 4, dropout=0.1, emb_dropout=0.1,
    )  # fmt: skip
    return Case(model, many(lambda: images(scale, side=64)), classify)


@entry("vision/vit_pytorch_cait", "vit-pytorch", refused="whole layers are dropped by a draw that the host reads")
def cait(scale: Scale) -> Case:
    """A deeper one whose layers are dropped by chance."""
    from vit_pytorch.cait import CaiT

    model = CaiT(
        image_size=64, patch_size=16, num_classes=10, dim=32, depth=4, cls_depth=2, heads=4, mlp_dim=64, dim_head=8,
        layer_dropout=0.05,
    )  # fmt: skip
    return Case(model, many(lambda: images(scale, side=64)), classify)


def _hf_images(scale: Scale) -> dict[str, Tensor]:
    x, y = images(scale, side=64)
    return {"pixel_values": x, "labels": y}


def _hf_vision(config: str, model: str, options: Callable[[Scale], dict[str, Any]]) -> Callable[[Scale], Case]:
    def make(scale: Scale) -> Case:
        import transformers

        made = getattr(transformers, model)(
            getattr(transformers, config)(num_labels=10, image_size=64, **options(scale))
        )
        predict = lambda model, batch: model(batch["pixel_values"]).logits  # noqa: E731
        return Case(made, many(lambda: _hf_images(scale)), lambda model, batch: model(**batch).loss, predict=predict)

    return make


def _sizes(scale: Scale) -> dict[str, Any]:
    hidden, layers = scale.pick((32, 2), (192, 12))
    heads = {"num_attention_heads": 4, "patch_size": 16}
    return {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden, **heads}


def _swin(scale: Scale) -> dict[str, Any]:
    return {"embed_dim": scale.pick(16, 96), "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}


entry("vision/hf_vit", "transformers", core=True)(_hf_vision("ViTConfig", "ViTForImageClassification", _sizes))
entry("vision/hf_swin", "transformers", core=True)(_hf_vision("SwinConfig", "SwinForImageClassification", _swin))
entry("vision/hf_dinov2", "transformers")(_hf_vision("Dinov2Config", "Dinov2ForImageClassification", _sizes))
entry("vision/hf_deit", "transformers")(_hf_vision("DeiTConfig", "DeiTForImageClassification", _sizes))


@entry("vision/hf_clip", "transformers", core=True)
def clip(scale: Scale) -> Case:
    """Images and padded captions with CLIP's contrastive loss."""
    from transformers import CLIPConfig, CLIPModel

    from recipes.zoo.batches import VOCABULARY, sentences

    hidden, layers = scale.pick((32, 2), (256, 8))
    same = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 4 * hidden,
    }
    text = {
        **same,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "eos_token_id": 3,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    config = CLIPConfig(text_config=text, vision_config={**same, "image_size": 64, "patch_size": 16}, projection_dim=32)

    def batch() -> dict[str, Tensor]:
        words = sentences(scale, "none")
        return {**words, "pixel_values": torch.randn(len(words["input_ids"]), 3, 64, 64)}

    def predict(model: Any, batch: dict[str, Tensor]) -> Any:
        return model(**batch).logits_per_image

    return Case(
        CLIPModel(config), many(batch), lambda model, batch: model(**batch, return_loss=True).loss, predict=predict
    )


@entry("vision/torchmetrics", "torchmetrics")
def with_metrics(scale: Scale) -> Case:
    """A small network whose step updates and logs torchmetrics."""
    return _measured(scale, macro=False)


@entry("vision/torchmetrics_macro", "torchmetrics", refused="torch.bincount's result is as long as its largest value")
def with_macro_metrics(scale: Scale) -> Case:
    """The same with a confusion matrix, and averages over classes, torchmetrics' default."""
    return _measured(scale, macro=True)


def _measured(scale: Scale, *, macro: bool) -> Case:
    import lightning.pytorch as pl
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

    average: Any = "macro" if macro else "micro"

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                nn.Dropout(0.1), nn.Linear(256, 10),
            )  # fmt: skip
            self.metrics = MetricCollection(
                [MulticlassAccuracy(10, average=average), MulticlassF1Score(10, average=average)], prefix="train/"
            )
            self.confusion = MulticlassConfusionMatrix(10) if macro else None

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            scores = self.body(x)
            loss = F.cross_entropy(scores, y)
            if self.confusion is not None:
                self.confusion.update(scores, y)
            self.log("train/loss", loss, prog_bar=True)
            self.metrics(scores, y)
            self.log_dict(self.metrics, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1000, cycle_momentum=False)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Case(Classifier(), many(lambda: images(scale)))


@entry("vision/lightly_simclr", "lightly", "torchvision")
def simclr(scale: Scale) -> Case:
    """Lightly's SimCLR: two views, its projection head and its NT-Xent loss."""
    import torchvision
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    backbone = nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-1], nn.Flatten())
    model = nn.Sequential(backbone, SimCLRProjectionHead(512, 64, 32))
    criterion = NTXentLoss(temperature=0.1)

    def batch() -> tuple[list[Tensor], Tensor, list[str]]:
        (a, y), (b, _) = images(scale), images(scale)
        return [a, b], y, [f"img_{next(_serial)}.jpg" for _ in range(len(y))]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        left, right = batch[0]
        found: Tensor = criterion(model(left), model(right))
        return found

    return Case(model, many(batch, 4), loss)


@entry("vision/lightly_byol", "lightly", "torchvision")
def byol(scale: Scale) -> Case:
    """Lightly's BYOL: a momentum encoder that is updated in the step, on a schedule of Python floats."""
    import copy

    import lightning.pytorch as pl
    import torchvision
    from lightly.loss import NegativeCosineSimilarity
    from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.utils.scheduler import cosine_schedule

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(*list(torchvision.models.resnet18(weights=None).children())[:-1])
            self.projection = BYOLProjectionHead(512, 64, 32)
            self.prediction = BYOLPredictionHead(32, 64, 32)
            self.backbone_momentum = copy.deepcopy(self.backbone)
            self.projection_momentum = copy.deepcopy(self.projection)
            deactivate_requires_grad(self.backbone_momentum)
            deactivate_requires_grad(self.projection_momentum)
            self.criterion = NegativeCosineSimilarity()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
            update_momentum(self.backbone, self.backbone_momentum, m=momentum)
            update_momentum(self.projection, self.projection_momentum, m=momentum)
            views = batch[0]
            aims = [self.projection_momentum(self.backbone_momentum(view).flatten(1)).detach() for view in views]
            said = [self.prediction(self.projection(self.backbone(view).flatten(1))) for view in views]
            loss: Tensor = 0.5 * (self.criterion(said[0], aims[1]) + self.criterion(said[1], aims[0]))
            self.log("train_loss_ssl", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)

    def batch() -> Any:
        (a, y), (b, _) = images(scale), images(scale)
        return [a, b], y

    return Case(BYOL(), many(batch, 4))
