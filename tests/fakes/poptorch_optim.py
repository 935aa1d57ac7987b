"""poptorch.optim of the stand-in: what an optimiser is told; the device does the arithmetic (poptorch.py)."""

import torch


class VariableAttributes:
    def __init__(self, variable_attributes, allowed_attributes):
        self._variable = list(variable_attributes)
        self._allowed = list(allowed_attributes)

    def isConstant(self, attr):
        return attr not in self._variable

    def _check(self, attr):
        if attr not in self._allowed:
            raise AssertionError(f"unknown attribute {attr}; one of {self._allowed}")

    def markAsConstant(self, attr):
        self._check(attr)
        self._variable = [name for name in self._variable if name != attr]

    def markAsVariable(self, attr):
        self._check(attr)
        self._variable.append(attr)


class Optimizer:
    """The part that all optimisers share: a state that lives on the device and is read back by name."""

    def __init__(self):
        self._state_dict = {"ipu_state": None, "ipu_param": None}
        self._executor = None
        self._to_device = False

    def state_dict(self):
        if self._executor is not None:
            self._executor._read_optimizer_state(self)
        return self.get_state_dict()

    def load_state_dict(self, state):
        torch.optim.Optimizer.load_state_dict(self, {key: state[key] for key in ("state", "param_groups")})
        self.set_state_dict(state)

    def get_state_dict(self):
        return {**self._state_dict, **torch.optim.Optimizer.state_dict(self)}

    def set_state_dict(self, state):
        if not state or "ipu_state" not in state or "ipu_param" not in state:
            raise RuntimeError("Only IPU optimizer states can be loaded onto the IPU.")
        self._state_dict = {key: state[key] for key in ("ipu_state", "ipu_param")}
        self._to_device = True

    def has_state(self):
        return self._state_dict["ipu_state"] is not None

    def _setup(self, given, defaults, types):
        for name, dtype in types.items():
            if dtype not in (torch.float16, torch.float32):
                raise AssertionError(f"{name} must be float16 or float32")
            setattr(self, name, dtype)
        self.variable_attrs = VariableAttributes(
            [name for name, value in given.items() if value is not None], list(defaults) + ["loss_scaling"]
        )


class LAMB(Optimizer, torch.optim.Optimizer):
    _trust = True

    def __init__(
        self,
        params,
        lr=None,
        betas=None,
        eps=None,
        weight_decay=None,
        bias_correction=None,
        loss_scaling=None,
        max_weight_norm=None,
        accum_type=None,
        first_order_momentum_accum_type=None,
        second_order_momentum_accum_type=None,
    ):
        arguments = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_weight_norm=max_weight_norm,
            loss_scaling=loss_scaling,
        )
        filled = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, max_weight_norm=65500.0)
        defaults = {name: value if arguments[name] is None else arguments[name] for name, value in filled.items()}
        Optimizer.__init__(self)
        torch.optim.Optimizer.__init__(self, params, defaults)
        self.bias_correction = True if bias_correction is None else bias_correction
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self._setup(
            arguments,
            defaults,
            {
                "accum_type": accum_type or torch.float32,
                "first_order_momentum_accum_type": first_order_momentum_accum_type or torch.float32,
                "second_order_momentum_accum_type": second_order_momentum_accum_type or torch.float32,
            },
        )

    def step(self, closure=None):
        raise RuntimeError("the stand-in's optimisers run on the device only")


class AdamW(Optimizer, torch.optim.AdamW):
    _trust = False

    def __init__(
        self,
        params,
        lr=None,
        betas=None,
        eps=None,
        weight_decay=None,
        amsgrad=None,
        maximize=None,
        foreach=None,
        capturable=None,
        differentiable=None,
        fused=None,
        loss_scaling=None,
        bias_correction=None,
        accum_type=None,
        first_order_momentum_accum_type=None,
        second_order_momentum_accum_type=None,
        max_grad_norm=None,
    ):
        if amsgrad:
            raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
        arguments = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, loss_scaling=loss_scaling)
        passed = {name: value for name, value in arguments.items() if value is not None and name != "loss_scaling"}
        Optimizer.__init__(self)
        torch.optim.AdamW.__init__(self, params, **passed)
        self.bias_correction = True if bias_correction is None else bias_correction
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self._setup(
            arguments,
            self.defaults,
            {
                "accum_type": accum_type or torch.float32,
                "first_order_momentum_accum_type": first_order_momentum_accum_type or torch.float32,
                "second_order_momentum_accum_type": second_order_momentum_accum_type or torch.float32,
            },
        )
