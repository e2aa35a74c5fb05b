"""Batch normalization with the statistics of all ranks' batches.

Each rank sends the count, the mean and the sum of squared deviations of its part, per channel. They
are combined after Chan, Golub and LeVeque, "Algorithms for computing the sample variance" (1983):
nothing is lost where the mean is large against the deviation, and ranks may differ in batch size.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from phalanx import collectives, functional
from phalanx.groups import ProcessGroup
from phalanx.world import is_initialized, resolve

# NumPy's operations on a few numbers, one per channel, take a fraction of the time of torch's.
_Array = NDArray[Any]

_HALVES = (torch.float16, torch.bfloat16)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Batch norm's kernel adds floats one after the other where a channel lies in one piece. From this
# many values per sample on, group norm's gets the moments of the pieces in a third of the time.
_PLANE = 64


class SyncBatchNorm(_BatchNorm):
    """Normalize each channel by the mean and variance over the batches of all ranks.

    Takes inputs of 2 or more dimensions, the channels in the second. In training, all ranks of
    ``process_group`` (default: the world) must call it, and do its backward if the input has a
    gradient, as often and in the same order; batches may differ in size, also be empty. Running
    statistics are then the same on all ranks. In evaluation, in a group of one rank and without an
    initialised world it is plain batch normalization. Gradients of weight and bias are this rank's
    part, which DistributedDataParallel averages.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``input``; in training an exchange with all ranks of the group."""
        self._check_input_dim(input)
        group = self._others()
        if group is None:
            return super().forward(input)
        self._check_input(input)
        return cast(Tensor, self._together(input, group))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _together(self, input: Tensor, group: ProcessGroup) -> Tensor:
        mean, variance, count = _statistics(input.detach(), group)
        if count == 1:
            raise ValueError(
                "SyncBatchNorm: expected more than 1 value per channel when training, got 1 in "
                f"the batches of all {group.size()} ranks together (input here: "
                f"{tuple(input.shape)}): use larger batches, or call eval()"
            )
        if self.track_running_stats:
            self._track(mean, variance, count)
        output = cast(Any, _Normalize).apply(
            input, self.weight, self.bias, mean, variance, count, self.eps, group
        )
        return cast(Tensor, output)

    def _others(self) -> ProcessGroup | None:
        """Return the group to agree with, None if there is nobody to agree with."""
        if not self.training or (self.process_group is None and not is_initialized()):
            return None
        group = resolve(self.process_group)
        return group if group.size() > 1 else None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def _check_input(self, input: Tensor) -> None:
        """Refuse, before anything is exchanged, what the others could not be told of."""
        if input.device.type != "cpu":
            raise ValueError(f"SyncBatchNorm needs an input on the cpu, got one on {input.device}")
        if not input.is_floating_point():
            raise ValueError(f"SyncBatchNorm needs a floating point input, got {input.dtype}")
        for name in ("running_mean", "weight"):
            of_channels = getattr(self, name)
            if of_channels is not None and len(of_channels) != input.size(1):
                raise ValueError(
                    f"SyncBatchNorm: the input has {input.size(1)} channels (shape "
                    f"{tuple(input.shape)}), {name} is for {len(of_channels)}"
                )

    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:
                factor = 1.0 / self.num_batches_tracked.item()
        if count > 0 and self.running_mean is not None and self.running_var is not None:
            unbiased = variance * (count / (count - 1))
            for running, now in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.lerp_(now.to(running.dtype), factor or 0.0)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: ProcessGroup | None = None
    ) -> nn.Module:
        """Put a SyncBatchNorm in the place of every BatchNorm layer of ``module``, and return it.

        Layers of subclasses are converted too, and such as are SyncBatchNorm already. A new layer
        has the parameters and buffers of the old one: the same tensors under the same names. If
        ``module`` itself is a BatchNorm layer, the new layer is returned.
        """
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and isinstance(layer, LazyModuleMixin):
                raise ValueError(
                    f"convert_sync_batchnorm: {name or 'the module'} is a {type(layer).__name__}, "
                    "which does not know its number of channels before its first input: run one "
                    "batch through the model, then convert it"
                )
        return cls._converted(module, process_group, {})

    @classmethod
    def _converted(
        cls,
        module: nn.Module,
        process_group: ProcessGroup | None,
        done: dict[nn.Module, nn.Module],
    ) -> nn.Module:
        if module in done:
            return done[module]
        result = done[module] = module
        if isinstance(module, _BatchNorm):
            result = done[module] = cls._like(module, process_group)
        for name, child in list(module._modules.items()):
            if child is not None:
                result.add_module(name, cls._converted(child, process_group, done))
        return result

    @classmethod
    def _like(cls, layer: _BatchNorm, process_group: ProcessGroup | None) -> SyncBatchNorm:
        result = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
            device="meta",  # replaced at once
        )
        for name in ("weight", "bias"):
            result.register_parameter(name, getattr(layer, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            result.register_buffer(name, getattr(layer, name))
        result.training = layer.training
        if hasattr(layer, "qconfig"):
            result.qconfig = layer.qconfig
        return result


def _statistics(input: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, int]:
    """Return mean and variance of each channel, and its count, over the inputs of all ranks."""
    channels = input.size(1)
    own = np.zeros(2 * channels + 1)
    if input.numel() > 0:
        own[:channels], own[channels:-1] = _moments(_dense(input))
        own[-1] = input.numel() // channels
    everybody = np.empty((group.size(), len(own)))
    collectives.all_gather_single(torch.from_numpy(everybody), torch.from_numpy(own), group)
    counts = everybody[:, -1:]
    count = int(counts.sum())
    mean, squares = _combined(
        everybody[:, :channels], everybody[:, channels:-1], counts, max(count, 1)
    )
    precise = _precise(input.dtype)
    variance = torch.from_numpy(squares / max(count, 1))
    return torch.from_numpy(mean).to(precise), variance.to(precise), count


def _moments(input: Tensor) -> tuple[_Array, _Array]:
    """Return mean and sum of squared deviations of each channel."""
    samples, channels = input.shape[:2]
    count = input.numel() // channels
    plane = count // samples
    if plane >= _PLANE and input.is_contiguous() and input.dtype not in _HALVES:
        _, means, inverse = torch.native_group_norm(
            input, None, None, samples, channels, plane, channels, 0.0
        )
        squares = plane * inverse.double().pow_(-2).numpy()
        return _combined(means.double().numpy(), squares, plane, count)
    # Next to a float32 tensor the kernel returns float32 for halves.
    scratch = torch.zeros(2, channels, dtype=_precise(input.dtype))
    mean, variance = torch.batch_norm_update_stats(input, scratch[0], scratch[1], 0.0)
    return mean.numpy(), count * variance.double().numpy()


def _combined(
    means: _Array, squares: _Array, counts: _Array | int, count: int
) -> tuple[_Array, _Array]:
    """Return mean and squared deviations of the whole from those of its parts, one per row."""
    mean = (counts * means).sum(0) / count
    return mean, (squares + counts * (means - mean) ** 2).sum(0)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor contiguous, or with channels last where it has them so, or ``like`` has.

    Three dimensions become four: torch knows no channels last for three.
    """
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(-1)
    model = tensor if like is None else like
    if not model.is_contiguous() and model.stride(1) == 1 and model.dim() in _CHANNELS_LAST:
        return tensor.contiguous(memory_format=_CHANNELS_LAST[model.dim()])
    return tensor.contiguous()


class _Normalize(Function):
    """Normalize by given statistics, which the backward takes for what they are: of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        group: ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps, ctx.group = count, eps, group
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        output = batch_norm(_dense(input), mean, variance, scale, shift, False, 0.0, eps)
        return output.squeeze_(-1) if input.dim() == 3 else output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        wanted = zip(gradients(ctx, grad), ctx.needs_input_grad, strict=False)
        return (*(gradient if is_wanted else None for gradient, is_wanted in wanted), *[None] * 5)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of input (None if not needed), weight and bias."""
    input, weight, mean, variance = ctx.saved_tensors
    x, channels = _dense(input), len(mean)
    dy = _dense(grad, like=x)
    inverse = (variance + ctx.eps).rsqrt_()
    weight = None if weight is None else weight.to(mean.dtype)
    scale = inverse if weight is None else inverse * weight
    halves = x.dtype in _HALVES
    if x.numel() == 0:  # which the kernel does not survive
        local, (of_weight, of_bias) = x, mean.new_zeros(2, channels)
    else:
        local, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, weight, None, None, mean, inverse, True, ctx.eps, (halves, True, True)
        )
    if not ctx.needs_input_grad[0]:
        return None, of_weight, of_bias
    means = torch.stack((of_bias, of_weight))
    collectives.all_reduce(means, group=ctx.group)
    means /= -ctx.count
    if halves:
        # Only what the other ranks change in this rank's own gradient, `local`: so that nothing
        # is rounded to half precision that is larger than the result.
        means += torch.stack((of_bias, of_weight)) * (channels / max(x.numel(), 1))
    shift, slope = means.mul_(scale)
    of_input = batch_norm(x, mean, variance, slope, shift, False, 0.0, ctx.eps)
    if halves:
        of_input += local
    else:
        of_input.addcmul_(dy, scale.view(-1, *[1] * (x.dim() - 2)))
    return of_input.view_as(input), of_weight, of_bias


def _differentiable_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the same as ``_gradients``, in steps that can be differentiated again."""
    input, weight, mean, variance = ctx.saved_tensors
    group = ctx.group if ctx.needs_input_grad[0] else None
    others = [d for d in range(input.dim()) if d != 1]
    spread = (-1, *[1] * (input.dim() - 2))
    x, dy = input.to(mean.dtype), grad.to(mean.dtype)
    if group is not None:
        mean = functional.all_reduce(x.sum(others), group=group) / ctx.count
        squares = (x - mean.view(spread)).square().sum(others)
        variance = functional.all_reduce(squares, group=group) / ctx.count
    inverse = (variance + ctx.eps).rsqrt()
    normal = (x - mean.view(spread)) * inverse.view(spread)
    of_weight, of_bias = (dy * normal).sum(others), dy.sum(others)
    if group is None:
        return None, of_weight, of_bias
    shift, slope = functional.all_reduce(torch.stack((of_bias, of_weight)), group=group) / ctx.count
    scale = inverse if weight is None else inverse * weight
    of_input = (dy - shift.view(spread) - normal * slope.view(spread)) * scale.view(spread)
    return of_input.to(input.dtype), of_weight, of_bias
