"""LAMB and AdamW, their parameter groups, an engine-neutral form of their state, and the learning rate."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

import torch
from torch.optim.adamw import adamw

from ipu_packed_bert.settings.config import Config
from ipu_packed_bert.settings.schema import EPSILON, MAX_WEIGHT_NORM, OptimizerConfig
from pack_data.reading.fields import named

MOMENTS = ("exp_avg", "exp_avg_sq")  # tensors of an optimiser's state, for each parameter


class _Lamb(torch.optim.Optimizer):
    """LAMB as PopTorch 3.4 defines it, so that both engines take the same step.

    m and v are Adam's moments, c1 and c2 their bias corrections (1 without `bias_correction`), for every tensor w:

        u = (m / c1) / (sqrt(v) / sqrt(c2) + eps) + weight_decay * w
        w = w - lr * ratio * u        ratio = min(|w|, max_weight_norm) / |u|, or 1 if |w|, |u| or the bound is 0

    A group with max_weight_norm 0 therefore takes the steps of AdamW. Gradients are not clipped here, but by `clip`.
    """

    def __init__(self, parameters, **options: Any):
        super().__init__(parameters, dict(options, step=0))
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}

    @torch.no_grad()
    def step(self, closure=None):  # torch's signature, without a use of closure
        """Make one update from the gradients of the parameters."""
        for group in self.param_groups:
            group["step"] += 1
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if weights:
                self._update(group, weights)

    def _update(self, group: Dict[str, Any], weights: List[Any]) -> None:
        """Update the weights of a group."""
        gradients = [weight.grad for weight in weights]
        first, second = self._moments(weights)
        beta1, beta2 = group["betas"]
        correction1, correction2 = _corrections(group)

        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1.0 - beta2)

        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(correction2))
        torch._foreach_add_(scale, group["eps"])
        update = torch._foreach_div(first, correction1)
        torch._foreach_div_(update, scale)
        if group["weight_decay"]:
            torch._foreach_add_(update, weights, alpha=group["weight_decay"])
        if group["max_weight_norm"]:
            torch._foreach_mul_(update, _trust_ratios(weights, update, group["max_weight_norm"]))
        torch._foreach_add_(weights, update, alpha=-group["lr"])

    def _moments(self, weights: List[Any]) -> List[List[torch.Tensor]]:
        """Return the first and the second moments of weights."""
        return [[self.state[weight][name] for weight in weights] for name in MOMENTS]


def _trust_ratios(weights, updates, max_weight_norm: float) -> List[torch.Tensor]:
    """Return the factor `ratio` of each tensor."""
    weight_norms = torch.stack(torch._foreach_norm(weights))
    update_norms = torch.stack(torch._foreach_norm(updates))
    usable = (weight_norms > 0) & (update_norms > 0)
    divisors = torch.where(usable, update_norms, torch.ones_like(update_norms))
    ratios = weight_norms.clamp(max=max_weight_norm) / divisors
    return list(torch.where(usable, ratios, torch.ones_like(ratios)).unbind())


class _LambInPieces(_Lamb):
    """LAMB on a CPU, in pieces of tensors that stay in its cache; norms are summed in float64, gradients overwritten.

    Measured on an AMD EPYC (AVX2, one thread, medians of 5 rounds): 0.58 of the time of whole tensors at hidden size
    256, 0.48 at 768; 0.72 on one with AVX-512.
    """

    PIECE = 65_536  # numbers

    def _update(self, group: Dict[str, Any], weights: List[Any]) -> None:
        for weight in weights:
            self._update_one(weight, group)

    def _update_one(self, weight: torch.Tensor, group: Mapping[str, Any]) -> None:
        correction1, correction2 = _corrections(group)
        beta1, beta2 = group["betas"]
        # Becomes the update, piece by piece.
        gradient = weight.grad.reshape(-1)  # type: ignore[union-attr]
        moments = [self.state[weight][name].view(-1) for name in MOMENTS]
        pieces = zip(*(flat.split(self.PIECE) for flat in (weight.view(-1), gradient, *moments)))
        weight_square = update_square = 0.0
        for values, update, first, second in pieces:
            first.mul_(beta1).add_(update, alpha=1.0 - beta1)
            second.mul_(beta2).addcmul_(update, update, value=1.0 - beta2)
            torch.sqrt(second, out=update)
            update.div_(math.sqrt(correction2)).add_(group["eps"]).mul_(correction1)
            torch.div(first, update, out=update)
            if group["weight_decay"]:
                update.add_(values, alpha=group["weight_decay"])
            if group["max_weight_norm"]:
                # Not torch.dot, whose rounding depends on the alignment of the memory.
                weight_square += float(torch.linalg.vector_norm(values)) ** 2
                update_square += float(torch.linalg.vector_norm(update)) ** 2
        ratio = 1.0
        if weight_square and update_square:
            bounded = min(math.sqrt(weight_square), group["max_weight_norm"])
            ratio = bounded / math.sqrt(update_square)
        weight.view(-1).add_(gradient, alpha=-group["lr"] * ratio)


def _corrections(group: Mapping[str, Any]) -> List[float]:
    """Return the bias corrections of both moments of a parameter group."""
    if not group["bias_correction"]:
        return [1.0, 1.0]
    return [1.0 - beta ** group["step"] for beta in group["betas"]]


class _AdamW(_Lamb):
    """Adam with decoupled weight decay: LAMB with trust ratio 1 everywhere."""

    def _update(self, group: Dict[str, Any], weights: List[Any]) -> None:
        """Update by torch's fused kernel if possible: a single pass over memory in a fifth of the time."""
        if torch.__version__ < "2.4" or not group["bias_correction"]:
            return super()._update(group, weights)
        beta1, beta2 = group["betas"]
        first, second = self._moments(weights)
        # The kernel counts the steps of each weight, on its device.
        steps_before = float(group["step"] - 1)
        adamw(
            weights,
            [weight.grad for weight in weights],
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=[torch.full((), steps_before, device=weight.device) for weight in weights],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def parameter_groups(
    named_parameters: Iterable[Tuple[str, torch.nn.Parameter]], *, weight_decay: float
) -> List[Dict]:
    """Return three groups: biases, other vectors such as LayerNorm weights, and matrices.

    Args:
        named_parameters: parameters of the network.
        weight_decay: that of the matrices; other parameters have none, and the trust ratio of biases is 1.
    """
    biases: Dict = {"params": [], "weight_decay": 0.0, "max_weight_norm": 0.0}
    vectors: Dict = {"params": [], "weight_decay": 0.0}
    matrices: Dict = {"params": [], "weight_decay": weight_decay}
    for name, parameter in named_parameters:
        group = vectors if parameter.dim() == 1 else matrices
        if name.endswith("bias"):
            group = biases
        group["params"].append(parameter)
    return [biases, vectors, matrices]


def build_optimizer(
    model: torch.nn.Module,
    optimizer: OptimizerConfig,
    *,
    betas: Tuple[float, float],
    in_pieces: bool = False,
) -> torch.optim.Optimizer:
    """Build the configured optimiser.

    Args:
        model: the network with the parameters.
        optimizer: the settings.
        betas: decay of the moments, adjusted for packing (`Config.betas`).
        in_pieces: LAMB computes pieces of tensors, for a CPU. Graphs that are traced for IPUs have whole tensors.
    """
    options: Dict[str, Any] = dict(
        lr=optimizer.learning_rate,
        betas=betas,
        eps=EPSILON,
        bias_correction=optimizer.bias_correction,
    )
    groups = parameter_groups(model.named_parameters(), weight_decay=optimizer.weight_decay)
    if optimizer.name == "adamw":
        groups = [{**group, "max_weight_norm": 0.0} for group in groups]
        return _AdamW(groups, **options)
    lamb = _LambInPieces if in_pieces else _Lamb
    return lamb(groups, max_weight_norm=MAX_WEIGHT_NORM, **options)


def gradient_norm(gradients: List[torch.Tensor]) -> torch.Tensor:
    """Compute the L2 norm of all gradients together, [] on their device, without a sync."""
    norms = torch._foreach_norm(gradients)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip(gradients: List[torch.Tensor], norm: float, bound: float) -> None:
    """Scale gradients down to a bound in place, like `torch.nn.utils.clip_grad_norm_`.

    Args:
        gradients: all gradients.
        norm: their norm, from `gradient_norm`.
        bound: the largest norm; smaller gradients do not change.
    """
    coefficient = bound / (norm + 1e-6)
    if coefficient < 1.0:
        torch._foreach_mul_(gradients, coefficient)


def neutral_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Dict[str, Any]:
    """Return the state of an optimiser in the form of all engines: by parameter name, float32 on the CPU."""
    state: Dict[str, Any] = {"step": int(optimizer.param_groups[0]["step"])}
    for moment in MOMENTS:
        state[moment] = {}
        for name, parameter in model.named_parameters():
            tensor = optimizer.state[parameter][moment]
            state[moment][name] = tensor.detach().to(device="cpu", copy=True)
    return state


def load_neutral_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, state: Dict[str, Any]
) -> None:
    """Load a result of `neutral_state` of the same model, see `refuse_other_state`."""
    for moment in MOMENTS:
        for name, parameter in model.named_parameters():
            optimizer.state[parameter][moment].copy_(state[moment][name])
    for group in optimizer.param_groups:
        group["step"] = int(state["step"])


def refuse_other_state(state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError if a state of an engine has not the names and shapes of the model's parameters.

    Args:
        state: weights in entry "model", moments by kind in entry "optimizer".
        parameters: the parameters of the model, by name.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    parts = {"model state": state["model"]}
    for moment in MOMENTS:
        parts[f"optimizer state: {moment}"] = state["optimizer"][moment]
    for what, tensors in parts.items():
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        names = {**expected, **shapes}
        wrong = sorted(name for name in names if expected.get(name) != shapes.get(name))
        if wrong:
            first = wrong[0]
            raise ValueError(
                f"{what} of {named(first)} is {shapes.get(first)}, the model's is {expected.get(first)} ({len(wrong)} "
                "differ); load it into the model from which it was saved"
            )


def warmup_linear(step: int, *, steps: int, warmup_steps: int) -> float:
    """Return the learning rate of one update as a share of the peak.

    It rises linearly in the warm-up, then falls linearly towards 0, the rate of the update after the last. Update 0 has
    a rate above 0, because it would be wasted otherwise.

    Args:
        step: the update; 0 is the first.
        steps: updates of the schedule.
        warmup_steps: updates of the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    left = (steps - step) / max(1, steps - warmup_steps)
    return max(0.0, left)


# Share of the peak after the warm-up: (remaining part of the schedule, from 1 to 0; its power) -> share.
_AFTER_WARMUP: Dict[str, Callable[[float, float], float]] = {
    "linear": lambda left, power: left,
    "polynomial": lambda left, power: left**power,
    "cosine": lambda left, power: 0.5 - 0.5 * math.cos(math.pi * left),
    "constant": lambda left, power: 1.0,
}


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of update ``step`` (0-based) of a run; all schedules have the same linear warm-up."""
    optimizer = config.optimizer
    steps = config.schedule_steps
    warmup_steps = round(optimizer.warmup_fraction * steps)
    share = warmup_linear(step, steps=steps, warmup_steps=warmup_steps)
    if step >= warmup_steps:
        share = _AFTER_WARMUP[optimizer.schedule](share, optimizer.schedule_power)
    return optimizer.learning_rate * share
