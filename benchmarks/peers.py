"""Other CPU implementations of attention, where installed: onnxruntime and OpenVINO, on the same q, k, v.

Each builds a callable for a (batch, heads, length, dim) case, full or causal, in fp32 or bf16; None where it has no
such kernel or isn't installed. They are no dependency of poise: `pip install onnx onnxruntime openvino` brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Peer = Callable[[Tensor, Tensor, Tensor, bool, int], Callable[[], Any] | None]


def onnxruntime(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Callable[[], Any] | None:
    """com.microsoft.MultiHeadAttention, their fused CPU kernel. [B, N, H * D] in and out, float32 only."""
    import onnx
    import onnxruntime as ort
    from onnx import TensorProto, helper

    if q.dtype != torch.float32:
        return None
    b, h, n, d = q.shape
    shape = [b, n, h * d]
    node = helper.make_node(
        "MultiHeadAttention", list("qkv"), ["o"], domain="com.microsoft", num_heads=h, unidirectional=int(causal)
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "qkvo"]
    graph = helper.make_graph([node], "attention", values[:3], values[3:])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {
        name: x.transpose(1, 2).reshape(shape).contiguous().numpy() for name, x in zip("qkv", (q, k, v), strict=True)
    }
    return lambda: session.run(None, feeds)


def openvino(q: Tensor, k: Tensor, v: Tensor, causal: bool, threads: int) -> Callable[[], Any] | None:
    """Their ScaledDotProductAttention op, inferring in the inputs' precision."""
    import openvino as ov
    import openvino.opset13 as ops

    kind = ov.Type.f32 if q.dtype == torch.float32 else ov.Type.bf16
    parameters = [ops.parameter(list(x.shape), kind) for x in (q, k, v)]
    out = ops.scaled_dot_product_attention(*parameters, causal=causal)
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": kind.to_string(), "NUM_STREAMS": 1}
    request = ov.Core().compile_model(ov.Model([out], parameters), "CPU", settings).create_infer_request()
    for index, x in enumerate((q, k, v)):
        request.input_tensors[index].data[:] = (
            x.numpy()
            if kind == ov.Type.f32
            else x.view(torch.int16).numpy().view(request.input_tensors[index].data.dtype)
        )
    return lambda: request.infer()


PEERS: dict[str, Peer] = {"onnxruntime": onnxruntime, "openvino": openvino}


def installed() -> tuple[dict[str, Peer], list[str]]:
    """The peers that can be imported, and a line for each that cannot."""
    import importlib.util

    found = {name: peer for name, peer in PEERS.items() if importlib.util.find_spec(name)}
    return found, [f"{name} is not installed: not compared" for name in PEERS if name not in found]
