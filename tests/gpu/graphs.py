"""A reference engine on a GPU that computes in a CUDA graph, which has the addresses of its weights.

python -m tests.gpu.graphs [--packs] MODEL --port PORT --device DEVICE
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from weightsync.engine.adapter import Sealed, StandbyHooks
from weightsync.testing import ModelAdapter, serve

#: Tokens of a prompt and its continuation.
LENGTH = 32


class GraphAdapter(ModelAdapter):
    """Its weights stay where they are. With ``packs`` its loader also makes a second form of the output layer, which
    the graph computes with, so that it cannot be recorded."""

    def __init__(self, folder, device, packs):
        super().__init__(folder, device)
        self._packs = packs
        if packs:
            self._pack(self.model)
        self._tokens = torch.zeros(1, LENGTH, dtype=torch.long, device=self.device)
        self._record()

    def loader_hooks(self):
        if self._packs:
            return Sealed(self.model, "it packs its output layer", self._standby)
        return super().loader_hooks()._replace(movable="a CUDA graph has the addresses of the weights")

    def load(self, weights):
        super().load(weights)
        if self._packs:
            self._pack(self.model)

    def generate(self, prompt, tokens):
        sequence, logprobs = list(prompt), []
        for _ in range(tokens):
            self._tokens[0, : len(sequence)].copy_(torch.tensor(sequence))
            self._graph.replay()
            found = self._logits[0, len(sequence) - 1].float().log_softmax(-1)
            sequence.append(int(found.argmax()))
            logprobs.append(float(found.max()))
        return sequence[len(prompt) :], logprobs

    def _standby(self):
        nbytes = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        return StandbyHooks(self.model, nbytes, self._make, self._load_into, lambda: None, lambda _: None, stays=True)

    def _make(self, weights):
        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype="auto").to(self.device).eval()
        self._load_into(model, weights)
        return model

    @torch.no_grad()
    def _load_into(self, model, weights):
        state = model.state_dict()
        for name, tensor in weights:
            state[name].copy_(tensor)
        self._pack(model)

    @torch.no_grad()
    def _pack(self, model):
        transposed = model.lm_head.weight.T.contiguous()
        if hasattr(model, "packed"):
            model.packed.copy_(transposed)
        else:
            model.packed = transposed

    @torch.inference_mode()
    def _record(self):
        mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(self.model.dtype).min, device=self.device).triu(1)
        self._inputs = {
            "input_ids": self._tokens,
            "attention_mask": mask.to(self.model.dtype),
            "position_ids": torch.arange(LENGTH, device=self.device)[None],
            "use_cache": False,
        }

        def compute():
            hidden = self.model.model(**self._inputs).last_hidden_state
            return hidden @ self.model.packed if self._packs else self.model.lm_head(hidden)

        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                compute()  # libraries choose and allocate, which no graph may do
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = compute()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--packs", action="store_true")
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--device", type=torch.device)
    args = parser.parse_args()
    serve(GraphAdapter(args.model, args.device, args.packs), args.model, args.port)


if __name__ == "__main__":
    main()
