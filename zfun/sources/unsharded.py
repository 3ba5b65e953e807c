"""The state of an optimizer that DeepSpeed writes without ZeRO, for loops that have its groups.

The file of the model has the ``state_dict()`` of the optimizer, with places of parameters in place
of their names. Beside parameters of 16 bits this dict is inside of another one, with the master
weights and the loss scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zfun.errors import CheckpointError
from zfun.sources._files import StoredTensor
from zfun.sources._pickles import load


class Unsharded(NamedTuple):
    """The state of an optimizer.

    Attributes:
        numbers: of the groups and of the loss scale.
        places: the moments and the master weight of each parameter, in the order of the groups.
    """

    numbers: Mapping[str, Any]
    places: Sequence[Mapping[str, Any]]

    def read(self) -> dict[int, dict[str, Any]]:
        """Return the moments and master weights by place, of parameters that have any."""
        tensor = lambda x: x.read() if isinstance(x, StoredTensor) else x
        found = {i: {k: tensor(x) for k, x in own.items()} for i, own in enumerate(self.places)}
        return {i: own for i, own in found.items() if own}


def optimizer_of(path: Path) -> Unsharded | None:
    """Open the optimizer in the directory of one tag; ``None`` if ZeRO wrote it, or nobody."""
    file = path / "mp_rank_00_model_states.pt"
    if (path / "zero").is_dir() or any(path.glob("*optim_states.pt")) or not file.is_file():
        return None
    state = load(file, inert="deepspeed.").get("optimizer")
    if not isinstance(state, dict):
        return None
    inner = state.get("optimizer_state_dict", state)
    groups, entries = inner.get("param_groups", ()), inner.get("state", {})
    places = [dict(entries.get(i, {})) for group in groups for i in group["params"]]
    if inner is state:
        return Unsharded({"param_groups": groups}, places)
    masters = [x for group in state.get("fp32_groups", ()) for x in group]
    if len(masters) != len(places):
        raise CheckpointError(
            "load_checkpoint() takes the moments of stage 0 parameter by parameter; got flat ones, "
            f"as of FusedAdam, in {str(file)!r}; pass load_optimizer_states=False for new moments",
            path=str(file),
        )
    for place, master in zip(places, masters, strict=True):
        place["master"] = master
    scale = {"dynamic": state.get("dynamic_loss_scale", True), **state}
    return Unsharded({"param_groups": groups, "loss_scaler": scale}, places)
