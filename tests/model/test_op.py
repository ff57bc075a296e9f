import pytest
import torch

from omni_kv.model.attention import BackendError, PagedWindow, attend, choose_backend
from omni_kv.model.geometry import preset
from omni_kv.model.op import ar_diffusion_paged_write_attn, write_slots
from omni_kv.sandbox.memory import map_region

HEADS, DIM, BLOCK, PAGES = 4, 16, 8, 12


def call(num_kv_heads=2, lengths=(29, 17), queries=(5, 3), in_order=False, seed=0):
    """Arguments of the op for some sequences in pages in random order."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    tokens = sum(queries)
    pools = [randn(PAGES * BLOCK, num_kv_heads, DIM) for _ in range(2)]
    if in_order:
        block_table = None
        table = torch.arange(PAGES).unsqueeze(0)
    else:
        table = torch.randperm(PAGES, generator=generator).view(len(lengths), -1)
        block_table = table.to(torch.int32)
    slots = []
    for pages, length, count in zip(table, lengths, queries, strict=True):
        position = torch.arange(length - count, length)
        slots.append(pages[position // BLOCK] * BLOCK + position % BLOCK)
    return dict(
        query=randn(tokens, HEADS, DIM),
        key=randn(tokens, num_kv_heads, DIM),
        value=randn(tokens, num_kv_heads, DIM),
        key_pool=pools[0],
        value_pool=pools[1],
        slot_mapping=torch.cat(slots),
        block_table=block_table,
        query_start_loc=torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_size=BLOCK,
        softmax_scale=DIM**-0.5,
        backend="sdpa",
    )


def dense(arguments):
    """The op, written out token by token in float64."""
    a = arguments
    key_pool, value_pool = a["key_pool"].double(), a["value_pool"].double()
    key_pool[a["slot_mapping"]] = a["key"].double()
    value_pool[a["slot_mapping"]] = a["value"].double()
    out = []
    for i, length in enumerate(a["seq_lens"].tolist()):
        pages = range(PAGES) if a["block_table"] is None else a["block_table"][i].tolist()
        slots = [page * BLOCK + o for page in pages for o in range(BLOCK)][:length]
        group = HEADS // key_pool.shape[1]
        first, last = a["query_start_loc"][i : i + 2].tolist()
        for query in a["query"][first:last].double():
            heads = []
            for h in range(HEADS):
                scores = key_pool[slots, h // group] @ query[h] * a["softmax_scale"]
                heads.append(scores.softmax(0) @ value_pool[slots, h // group])
            out.append(torch.stack(heads))
    return torch.stack(out), key_pool, value_pool


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"num_kv_heads": 4},
        {"lengths": (43,), "queries": (7,), "in_order": True},
        {"lengths": (32, 1, 9), "queries": (2, 1, 9)},
    ],
    ids=["grouped heads", "as many kv heads", "pages in order", "ragged and full pages"],
)
def test_the_op_writes_then_attends_like_float64(backend, case):
    arguments = call(**case) | {"backend": backend}
    expected = dense(arguments)
    out = ar_diffusion_paged_write_attn(**arguments)
    assert out.is_contiguous()
    for got, want in zip(
        (out, arguments["key_pool"], arguments["value_pool"]), expected, strict=True
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_order", [False, True])
def test_opcheck_passes(in_order):
    arguments = call(lengths=(29,), queries=(5,), in_order=in_order)
    torch.library.opcheck(
        torch.ops.omni_kv.ar_diffusion_paged_write_attn.default, (), kwargs=arguments
    )


def test_a_sequence_length_that_changes_does_not_recompile():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda a: ar_diffusion_paged_write_attn(**a), backend=backend)
    with torch.no_grad():
        for length in (9, 10, 29, 30):
            arguments = call(lengths=(length,), queries=(5,))
            out = compiled(arguments)
            window = PagedWindow(*(arguments[name] for name in PagedWindow._fields))
            given = (arguments[name] for name in ("backend", "query", "key_pool", "value_pool"))
            torch.testing.assert_close(out, attend(*given, window), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "device", "changes", "message"),
    [
        ("warp", "cpu", {}, "unknown attention backend 'warp'; known: auto, flash-attn"),
        ("flash-attn", "cpu", {}, "'tiny' needs a CUDA device"),
        ("flash-attn", "cuda", {"block_size": 16}, "'tiny'"),
    ],
)
def test_a_backend_that_cannot_be_had_is_an_error_that_says_what_to_change(
    name, device, changes, message
):
    with pytest.raises(BackendError, match=message):
        choose_backend(name, preset("tiny").replace(**changes), device)


@pytest.mark.parametrize("header", range(5))
def test_slots_are_written_wherever_the_pool_begins(header):
    """Also where the pool is aligned to 16 bytes and its storage is not, or the other way round."""
    for unaligned in range(4):
        memory = map_region((header + 6 * 8,), torch.float32, after=unaligned).tensor
        pool = memory[header:].view(6, 2, 4)
        rows = torch.randn(2, 2, 4)
        write_slots(pool, torch.tensor([4, 1]), rows)
        assert torch.equal(pool[[4, 1]], rows)
        assert not pool[[0, 2, 3, 5]].any()
        assert not memory[:header].any()


def test_flash_attn_names_the_page_size_that_it_cannot_take(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(BackendError, match=r"lingbot-480x768.*multiple of 256.*block_size=16; set"):
        choose_backend("flash-attn", preset("lingbot-480x768"), "cuda")
    paged = preset("lingbot-480x768").replace(block_size=256)
    assert choose_backend("flash-attn", paged, "cuda") == "flash-attn"
