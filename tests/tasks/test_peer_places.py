"""Where copies of a model lie: whichever single node is lost, a whole one is left."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nereus.emu.decoder import DecoderConfig
from nereus.emu.layout import Layout
from nereus.emu.stage import FromFolder, StageSpec
from nereus.tasks.peer_places import Place, copy_units

MODEL = DecoderConfig(
    vocab_size=32,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    max_positions=128,
    tied=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def _spec(tp: int, pp: int) -> StageSpec:
    plain = StageSpec(
        name="actor.training", role="training", model=MODEL, units=(), origin=FromFolder(folder=Path("model"))
    )
    unit = Layout.make(plain.tensors, tp=tp, pp=pp, ranks=tuple(range(tp * pp)))
    return StageSpec(name=plain.name, role=plain.role, model=MODEL, units=(unit,), origin=plain.origin)


@given(
    tp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    nodes=st.lists(st.integers(0, 3), min_size=4, max_size=9),
)
def test_whichever_node_is_lost_one_whole_copy_is_left(tp: int, pp: int, nodes: list[int]) -> None:
    places = [Place(rank=rank, node=node) for rank, node in enumerate(nodes)]
    copies = copy_units(_spec(tp, pp), places)
    home = {nodes[rank] for rank in range(tp * pp)}
    if set(nodes) <= home:
        assert copies == ()
        return
    for lost in set(nodes):
        assert any(lost not in {nodes[rank] for rank in copy.layout.ranks} for copy in copies)
    taken = [rank for copy in copies for rank in copy.layout.ranks]
    assert len(taken) == len(set(taken))  # I1


def test_a_copy_takes_a_smaller_layout_where_the_other_node_is_small() -> None:
    places = [Place(rank=0, node=0), Place(rank=1, node=0), Place(rank=2, node=1)]
    near, far = copy_units(_spec(2, 1), places)
    assert (near.layout.tp, near.layout.ranks) == (2, (0, 1))
    assert (far.layout.tp, far.layout.ranks) == (1, (2,))
