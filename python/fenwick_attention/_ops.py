"""Loads the compiled operators ``torch.ops.fenwick.*`` and registers what Python adds to them: fake
kernels (shapes for ``torch.compile``, ``torch.export`` and the meta device), autograd, and batching
rules for ``torch.func.vmap``.

The schemas and the kernels are in ``torch/attention_ops.cc`` and ``torch/layer_ops.cc``.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fenwick_attention import _vmap

LIBRARY = "libfenwick_torch.so"
LIBRARY_VARIABLE = "FENWICK_TORCH_LIBRARY"
MINIMUM_TORCH = (2, 10)
_BUILD_FOLDERS = ("build/lib", "build/cuda/lib")  # in the source tree

# Name of an attention operator -> whether it takes beta.
ATTENTION = {"log_linear_attention": False, "log_linear_gated_delta_rule": True}

_loaded = False
_library = torch.library.Library("fenwick", "IMPL")  # registrations live as long as it


def library_path() -> Path:
    """The compiled library: the file named by ``FENWICK_TORCH_LIBRARY``, else the one installed in
    this package, else the one built in the source tree."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ImportError(f"{LIBRARY_VARIABLE}: expected a file, got {named!r}")
        return Path(named)
    import fenwick_attention  # an editable install has two folders: the sources and the library

    folders = [Path(folder) for folder in fenwick_attention.__path__]
    source_tree = Path(__file__).resolve().parents[2]
    for folder in [*folders, *(source_tree / build for build in _BUILD_FOLDERS)]:
        candidate = folder / LIBRARY
        if candidate.is_file():
            return candidate
    raise ImportError(
        f"fenwick_attention: {LIBRARY} not found. Install the package with `pip install .`, or "
        f"build the library with `make build`, or name it in {LIBRARY_VARIABLE}."
    )


def load() -> None:
    """Makes ``torch.ops.fenwick`` available; does nothing from the second call on."""
    global _loaded
    if _loaded:
        return
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MINIMUM_TORCH:
        raise ImportError(
            f"fenwick_attention: expected torch >= 2.10, got {torch.__version__}; upgrade torch"
        )
    path = library_path()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"fenwick_attention: cannot load {path.name} with torch {torch.__version__} "
            f"({error}); rebuild it against this torch with `pip install .`"
        ) from error
    for op, has_beta in ATTENTION.items():
        _register_attention(op, has_beta)
        _register_attention_with_state(op, has_beta)
        _register_step(op)
    _register_causal_conv1d()
    _register_gated_rms_norm()
    _register_l2_norm()
    _register_vmap()
    _loaded = True


def refuse_forward_mode(name: str, *tensors: Tensor | None) -> None:
    """Raises where a tensor carries a forward-mode derivative: torch has none for operators that
    are registered from outside, and would go on without it."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for x in tensors:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name}: expected a call outside forward-mode differentiation (torch.func.jvp, "
                "jacfwd, forward_ad), got one inside; use torch.autograd.grad"
            )


def mark_written(*tensors: Tensor) -> None:
    """Tells autograd that an operator wrote to the tensors, so that a backward pass which saved
    them raises instead of reading the new values."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _empty_like(tensor: Tensor) -> Tensor:
    """As the kernels allocate: contiguous whatever the layout of ``tensor``."""
    return tensor.new_empty(tensor.shape)


def _fake(op: str, function: Any) -> None:
    torch.library.register_fake(f"fenwick::{op}", function)


def _autograd(op: str, backward: Any, setup_context: Any) -> None:
    """`op` and, as raising, the derivative of `op`_backward."""

    def second(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(f"{op}: second derivatives (create_graph=True) do not exist")

    _register_autograd(op, backward, setup_context)
    _register_autograd(f"{op}_backward", second, lambda ctx, inputs, output: None)


def _register_autograd(op: str, backward: Any, setup_context: Any) -> None:
    """torch.library.register_autograd, but that a call does not look through the schema: forward
    and backward cost a quarter less of the host's time."""
    overload = getattr(torch.ops.fenwick, op).default
    # The dispatcher leaves out arguments that have their default values.
    defaults = [argument.default_value for argument in overload._schema.arguments]

    def call(keyset: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            args, keyset = inputs[:-1], inputs[-1]
            output = call(keyset, args)
            setup_context(ctx, args, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
            return (*backward(ctx, *grads), None)

    def kernel(keyset: Any, *given: Any) -> Any:
        args = (*given, *defaults[len(given) :])
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return Function.apply(*args, keyset)
        return call(keyset, args)

    _library.impl(op, kernel, "Autograd", with_keyset=True)


def _register_attention(op: str, has_beta: bool) -> None:
    count = 6 if has_beta else 5  # q, k, v, g, [beta,] level_scales

    def fake(*args: Any, **options: Any) -> Tensor:
        return _empty_like(args[2])

    def fake_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(_empty_like(tensor) for tensor in args[1 : 1 + count])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.scale, ctx.saturate = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, d_o: Tensor) -> tuple[Any, ...]:
        call = getattr(torch.ops.fenwick, f"{op}_backward")
        return (*call(d_o, *ctx.saved_tensors, ctx.scale, ctx.saturate), None, None, None)

    _fake(op, fake)
    _fake(f"{op}_backward", fake_backward)
    _autograd(op, backward, setup_context)


def _register_attention_with_state(op: str, has_beta: bool) -> None:
    count = 6 if has_beta else 5  # q, k, v, g, [beta,] level_scales
    parts = 5 if has_beta else 4  # k, v, g, [beta,] nodes: the state but for position and base

    def fake(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        v, state, num_slots = args[2], args[count : count + parts + 2], args[count + parts + 3]
        *rings, nodes, position, base = state
        sequences, heads, _, key_size, value_size = nodes.shape
        return (
            _empty_like(v),
            *(_empty_like(ring) for ring in rings),
            nodes.new_empty((sequences, heads, num_slots, key_size, value_size)),
            _empty_like(position),
            _empty_like(base),
        )

    def fake_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        first = 1 + parts  # after d_o and the gradient of the final state
        return tuple(_empty_like(tensor) for tensor in args[first : first + count + parts])

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, max_position = inputs[: count + parts + 2], inputs[count + parts + 2]
        cu_seqlens, ctx.scale, ctx.saturate = inputs[-3:]
        ctx.max_position = max_position
        ctx.save_for_backward(*tensors, cu_seqlens)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        call = getattr(torch.ops.fenwick, f"{op}_with_state_backward")
        results = call(
            *grads[: 1 + parts], *tensors, ctx.max_position, cu_seqlens, ctx.scale, ctx.saturate
        )
        # position, base, max_position, num_slots, cu_seqlens, scale, saturate
        return (*results, None, None, None, None, None, None, None)

    _fake(f"{op}_with_state", fake)
    _fake(f"{op}_with_state_backward", fake_backward)
    _autograd(f"{op}_with_state", backward, setup_context)


def _register_step(op: str) -> None:
    def fake(*args: Any, **options: Any) -> Tensor:
        return _empty_like(args[2])

    _fake(f"{op}_step", fake)


def _register_vmap() -> None:
    for op in ATTENTION:
        for suffix in ("", "_backward", "_with_state", "_with_state_backward"):
            _vmap.fold_into_batch(f"{op}{suffix}")
        _vmap.refuse(f"{op}_step", f"{op} with initial_state")
    for op in ("causal_conv1d", "gated_rms_norm", "l2_norm"):
        _vmap.run_one_by_one(op)
        _vmap.run_one_by_one(f"{op}_backward")
    _vmap.refuse("causal_conv1d_step", "causal_conv1d with initial_state")


def _register_causal_conv1d() -> None:
    def fake(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return _empty_like(x)

    def fake_backward(
        d_y: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        silu: bool,
    ) -> tuple[Tensor, ...]:
        optional = (
            x.new_empty(0) if tensor is None else _empty_like(tensor)
            for tensor in (bias, initial_state)
        )
        return (_empty_like(x), _empty_like(weight), *optional)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.silu = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: checkpointing unpacks a tensor only once
        d_x, d_weight, d_bias, d_state = torch.ops.fenwick.causal_conv1d_backward(
            d_y, *saved, ctx.silu
        )
        _, _, bias, initial_state, _ = saved
        return (
            d_x,
            d_weight,
            None if bias is None else d_bias,
            None if initial_state is None else d_state,
            None,
            None,
        )

    _fake("causal_conv1d", fake)
    _fake("causal_conv1d_backward", fake_backward)
    _fake("causal_conv1d_step", fake)
    _autograd("causal_conv1d", backward, setup_context)


def _register_gated_rms_norm() -> None:
    def fake(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return _empty_like(x)

    def fake_backward(
        d_y: Tensor,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor,
        eps: float,
        norm_before_gate: bool,
    ) -> tuple[Tensor, ...]:
        d_gate = x.new_empty(0) if gate is None else _empty_like(gate)
        return _empty_like(x), d_gate, _empty_like(weight)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.eps, ctx.norm_before_gate = inputs
        ctx.save_for_backward(*tensors)

    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        x, gate, weight = ctx.saved_tensors
        d_x, d_gate, d_weight = torch.ops.fenwick.gated_rms_norm_backward(
            d_y, x, gate, weight, ctx.eps, ctx.norm_before_gate
        )
        return d_x, None if gate is None else d_gate, d_weight, None, None

    _fake("gated_rms_norm", fake)
    _fake("gated_rms_norm_backward", fake_backward)
    _autograd("gated_rms_norm", backward, setup_context)


def _register_l2_norm() -> None:
    def fake(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return _empty_like(x)

    def fake_backward(d_y: Tensor, x: Tensor, eps: float) -> Tensor:
        return _empty_like(x)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.eps = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return torch.ops.fenwick.l2_norm_backward(d_y, x, ctx.eps), None

    _fake("l2_norm", fake)
    _fake("l2_norm_backward", fake_backward)
    _autograd("l2_norm", backward, setup_context)
