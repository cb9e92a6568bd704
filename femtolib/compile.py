"""torch.compile for what a step is made of: the layers, the loss, the optimizer's update. Each graph is counted when it
is made: one that is made again and again costs more than compiling gains, and nothing else would say so.
"""

import logging
import os
import shutil
import time
import types
from collections import Counter
from collections.abc import Callable

import torch

from femtolib.errors import FemtoError
from femtolib.model import Decoder
from femtolib.sections import CompileSection


class Compiler:
    """Compiles what `section` asks for, when it is first used. A first graph is for training, a second for validation;
    more are made where shapes change, or the kind of attention does.

    Raises FemtoError where a CPU's compiler is missing. The CUDA path is unverified.
    """

    def __init__(self, section: CompileSection, device: torch.device):
        self._section = section
        self._graphs, self._told, self._seconds = Counter(), Counter(), 0.0
        if not any(section.model_dump().values()):
            return
        for name in ("torch._dynamo.variables.ctx_manager", "torch._functorch._aot_autograd.autograd_cache"):
            logging.getLogger(name).setLevel(logging.ERROR)  # what they warn of concerns torch's developers
        cxx = os.environ.get("CXX", "g++")
        if device.type == "cpu" and not shutil.which(cxx):
            raise FemtoError(f"compile: code for a CPU is made by a C++ compiler, and {cxx} is not installed")

    def layers(self, model: Decoder) -> None:
        """Compile each layer as a whole; call it before the model is sharded, so that gathering parameters and reducing
        gradients stay outside. All have the same shapes, and one graph serves them."""
        if self._section.model:
            forward = self._compiled("layer", type(model.model.layers[0]).forward)
            for layer in model.model.layers:
                layer.forward = types.MethodType(forward, layer)  # not a wrapping module: it would change the names

    def loss(self, function: Callable) -> Callable:
        """`function`, compiled or as it is."""
        return self._compiled("loss", function) if self._section.loss else function

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compile the update. Its learning rate becomes a tensor: a number would be compiled in, anew each step.

        AdamW's count of steps is one already, of float32, and so is its bias correction then: 1e-7 of an update. SGD's
        momentum starts as zeros, which gives the same: where it is made in the first update, of some tensor parallel
        models, the compiler loses its way.
        """
        if not self._section.optimizer:
            return
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64)
            if "fused" in group:  # that kernel is one already, and cannot be compiled
                group |= {"foreach": True, "fused": False, "capturable": True}
            for parameter in group["params"] if group.get("momentum") else []:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        optimizer.step = self._compiled("update", optimizer.step, whole=False)

    def report(self) -> str | None:
        """What was compiled since the last report, if anything."""
        new = self._graphs - self._told
        self._told = self._graphs.copy()
        graphs = ", ".join(f"{name} (graphs: {self._graphs[name]})" for name in new)
        return f"compiled {graphs}; {self._seconds:.0f} s so far" if new else None

    def _compiled(self, name: str, function: Callable, *, whole: bool = True) -> Callable:
        inductor = torch._dynamo.lookup_backend("inductor")

        def counted(graph: torch.fx.GraphModule, inputs: list) -> Callable:
            self._graphs[name] += 1
            started = time.perf_counter()
            compiled = inductor(graph, inputs)
            self._seconds += time.perf_counter() - started
            return compiled

        return torch.compile(function, backend=counted, fullgraph=whole, dynamic=False)
