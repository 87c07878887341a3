"""Generative models: a VAE, GANs with manual optimization, diffusion, normalizing flows, a radiance field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.benchmarks.steps import perceptron
from recipes.zoo.batches import images, many
from recipes.zoo.registry import Case, Scale, entry


class _VAE(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = perceptron(784, width, 32, 2, nn.ReLU)
        self.decoder = perceptron(16, width, 784, 2, nn.ReLU)


@entry("generative/vae")
def vae(scale: Scale) -> Case:
    """A variational autoencoder: reparametrised noise, a reconstruction and a divergence."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        mean, log_variance = model.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        reconstruction = F.binary_cross_entropy_with_logits(model.decoder(latent), x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return reconstruction + 0.1 * divergence

    size = scale.pick(32, 128)
    return Case(_VAE(scale.pick(64, 512)), many(lambda: (torch.rand(size, 784), torch.randint(10, (size,)))), loss)


@entry("generative/vae_distributions")
def vae_distributions(scale: Scale) -> Case:
    """The same with torch.distributions, which validate their arguments."""
    from torch.distributions import Normal, kl_divergence

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        mean, log_scale = model.encoder(x).chunk(2, -1)
        posterior = Normal(mean, F.softplus(log_scale) + 1e-3)
        latent = posterior.rsample()
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return F.mse_loss(model.decoder(latent).sigmoid(), x) + 0.1 * kl_divergence(posterior, prior).mean()

    size = scale.pick(32, 128)
    return Case(_VAE(scale.pick(64, 512)), many(lambda: (torch.rand(size, 784), torch.randint(10, (size,)))), loss)


class _AnnealedVAE(_VAE):
    """Counts the steps, which weights and the temperature follow."""

    calls = 0


@entry("generative/vae_annealed")
def vae_annealed(scale: Scale) -> Case:
    """The divergence is weighted in over the first steps, the noise cooled, and the weights held small now and then."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.calls += 1
        x, _ = batch
        mean, log_variance = model.encoder(x).chunk(2, -1)
        noise = torch.randn_like(mean) / (1 + 0.01 * model.calls)
        made = model.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        total = F.mse_loss(made.sigmoid(), x) + min(1.0, model.calls / 100) * divergence
        if model.calls % 4 == 0:
            total = total + 1e-3 * sum(weight.square().mean() for weight in model.parameters())
        return total

    size = scale.pick(32, 128)
    model = _AnnealedVAE(scale.pick(64, 512))
    return Case(model, many(lambda: (torch.rand(size, 784), torch.randint(10, (size,)))), loss)


class _GAN(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = perceptron(16, width, 784, 2, nn.ReLU)
        self.critic = perceptron(784, width, 1, 2, nn.ReLU)


def _players(model: Any) -> list[nn.Module]:
    return [model.generator, model.critic]


def _adversarial(
    model: Any, optimizers: list[Any], batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any]
) -> Tensor:
    x, _ = batch
    generator, critic = optimizers
    noise = torch.randn(len(x), 16, device=x.device)
    made = model.generator(noise).sigmoid()
    fooled = F.softplus(-model.critic(made)).mean()
    generator.zero_grad()
    backward(fooled)
    generator.step()
    told = F.softplus(-model.critic(x)).mean() + F.softplus(model.critic(made.detach())).mean()
    critic.zero_grad()
    backward(told)
    critic.step()
    return fooled.detach() + told.detach()


@entry("generative/gan_manual", core=True)
def gan(scale: Scale) -> Case:
    """A GAN with manual optimization and two optimizers."""
    size = scale.pick(32, 128)
    batches = many(lambda: (torch.rand(size, 784), torch.randint(10, (size,))))
    return Case(_GAN(scale.pick(64, 256)), batches, update=_adversarial, parts=_players)


@entry("generative/gan_host_noise")
def gan_host_noise(scale: Scale) -> Case:
    """The GAN of Lightning's examples: noise and labels are made in host memory, and copied with ``type_as``."""

    def update(
        model: Any, optimizers: list[Any], batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any]
    ) -> Tensor:
        x, _ = batch
        generator, critic = optimizers
        noise = torch.randn(x.shape[0], 16).type_as(x)
        valid, fake = torch.ones(x.size(0), 1).type_as(x), torch.zeros(x.size(0), 1).type_as(x)
        made = model.generator(noise).sigmoid()
        fooled = F.binary_cross_entropy_with_logits(model.critic(made), valid)
        generator.zero_grad()
        backward(fooled)
        generator.step()
        told = F.binary_cross_entropy_with_logits(model.critic(x), valid)
        told = (told + F.binary_cross_entropy_with_logits(model.critic(made.detach()), fake)) / 2
        critic.zero_grad()
        backward(told)
        critic.step()
        return fooled.detach() + told.detach()

    size = scale.pick(32, 128)
    batches = many(lambda: (torch.rand(size, 784), torch.randint(10, (size,))))
    return Case(_GAN(scale.pick(64, 256)), batches, update=update, parts=_players)


class _Denoiser(nn.Module):
    """Predicts the noise; the schedule is a plain attribute, which stays in host memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = perceptron(784 + 1, width, 784, 3, nn.SiLU)
        self.kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)


@entry("generative/diffusion_host_steps")
def diffusion_host_steps(scale: Scale) -> Case:
    """Diffusion as in tutorials: the steps are drawn on the host, where the schedule lies, too."""

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        steps = torch.randint(0, 1000, (x.shape[0],))
        kept = model.kept[steps].to(x.device)[:, None]
        noise = torch.randn(x.shape).to(x.device)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        said = model.body(torch.cat([noisy, steps.to(x.device)[:, None] / 1000], 1))
        return F.mse_loss(said, noise)

    size = scale.pick(32, 128)
    model = _Denoiser(scale.pick(64, 512))
    return Case(model, many(lambda: (torch.rand(size, 784), torch.randint(10, (size,)))), loss)


@entry("generative/wgan_gp")
def wgan(scale: Scale) -> Case:
    """A Wasserstein GAN whose gradient penalty is differentiated twice."""

    def update(
        model: Any, optimizers: list[Any], batch: tuple[Tensor, Tensor], backward: Callable[[Tensor], Any]
    ) -> Tensor:
        x, _ = batch
        generator, critic = optimizers
        made = model.generator(torch.randn(len(x), 16, device=x.device)).sigmoid()
        mix = torch.rand(len(x), 1, device=x.device)
        between = (mix * x + (1 - mix) * made.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
        told = (
            model.critic(made.detach()).mean() - model.critic(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        )
        critic.zero_grad()
        backward(told)
        critic.step()
        generator.zero_grad()
        backward(-model.critic(made).mean())
        generator.step()
        return told.detach()

    size = scale.pick(32, 128)
    batches = many(lambda: (torch.rand(size, 784), torch.randint(10, (size,))))
    return Case(_GAN(scale.pick(64, 256)), batches, update=update, parts=_players)


@entry("generative/diffusion_unet", "diffusers")
def diffusion(scale: Scale) -> Case:
    """Diffusers' U-Net, trained to predict the noise that its scheduler adds at drawn steps."""
    from diffusers import DDPMScheduler, UNet2DModel

    channels = scale.pick((8, 16), (64, 128))
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = UNet2DModel(sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=channels,
                        norm_num_groups=4, attention_head_dim=8, **blocks)  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        noise = torch.randn_like(x)
        steps = torch.randint(0, 1000, (len(x),), device=x.device)
        noisy = scheduler.add_noise(x, noise, steps)
        return F.mse_loss(model(noisy, steps, return_dict=False)[0], noise)

    return Case(model, many(lambda: images(scale, side=16, size=scale.pick(2, 16))), loss)


@entry("generative/diffusion_conditional", "diffusers", "transformers")
def conditional(scale: Scale) -> Case:
    """A latent diffusion step: a conditional U-Net with cross-attention, the flow of the noise predicted."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    channels = scale.pick((8, 16), (64, 128))
    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=channels,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    scheduler = DDPMScheduler(num_train_timesteps=1000, prediction_type="v_prediction")
    size = scale.pick(2, 16)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["latents"]
        noise = torch.randn_like(x)
        steps = torch.randint(0, 1000, (len(x),), device=x.device).long()
        noisy = scheduler.add_noise(x, noise, steps)
        said = model(noisy, steps, encoder_hidden_states=batch["text"]).sample
        return F.mse_loss(said.float(), scheduler.get_velocity(x, noise, steps).float())

    return Case(model, many(lambda: {"latents": torch.randn(size, 4, 8, 8), "text": torch.randn(size, 12, 16)}), loss)


@entry("generative/autoencoder_kl", "diffusers")
def autoencoder_kl(scale: Scale) -> Case:
    """Diffusers' autoencoder, sampled, with its divergence."""
    from diffusers import AutoencoderKL

    channels = scale.pick((8, 16), (32, 64))
    model = AutoencoderKL(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                          block_out_channels=channels, norm_num_groups=4, latent_channels=4)  # fmt: skip

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        posterior = model.encode(x).latent_dist
        return F.mse_loss(model.decode(posterior.sample()).sample, x) + 1e-3 * posterior.kl().mean()

    return Case(model, many(lambda: images(scale, side=32, size=scale.pick(2, 16))), loss)


class _NeRF(nn.Module):
    bands: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(6))
        self.body = perceptron(3 + 36, width, 4, 4, nn.ReLU)

    def forward(self, points: Tensor) -> Tensor:
        angles = (points.unsqueeze(-1) * self.bands).flatten(-2)
        out: Tensor = self.body(torch.cat([points, angles.sin(), angles.cos()], -1))
        return out


@entry("generative/nerf")
def nerf(scale: Scale) -> Case:
    """A radiance field: stratified samples along rays, volume rendering, the colours' error."""
    rays, samples = scale.pick((32, 8), (1024, 32))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        edges = torch.linspace(2.0, 6.0, samples, device=batch["origin"].device)
        depth = edges + torch.rand(len(batch["origin"]), samples, device=edges.device) * (4.0 / samples)
        points = batch["origin"][:, None] + depth[..., None] * batch["direction"][:, None]
        out = model(points)
        opacity = 1 - torch.exp(-F.relu(out[..., 3]) * (4.0 / samples))
        clear = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity[:, :-1] + 1e-10], 1), 1)
        return F.mse_loss(((opacity * clear)[..., None] * out[..., :3].sigmoid()).sum(1), batch["colour"])

    def batch() -> dict[str, Tensor]:
        direction = F.normalize(torch.randn(rays, 3), dim=-1)
        return {"origin": torch.randn(rays, 3), "direction": direction, "colour": torch.rand(rays, 3)}

    return Case(_NeRF(scale.pick(32, 256)), many(batch), loss)
