"""What is exported can be read by others, and reads back as the same trace."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from traces import parquet, record
from traces.export import Blocks, export, write
from traces.importers.intake import Options
from traces.importers.load import table


def trace(tmp_path, **columns):
    path = tmp_path / "in.parquet"
    parquet.write(record.table(columns, record.Metadata(epoch="unix", source="test")), path)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_mooncake_lines_count_from_the_first_row_in_ms(tmp_path):
    path = trace(
        tmp_path,
        arrival_ns=[10**18, 10**18 + 3 * 10**9, 10**18 + 4_052_000_001],
        input_tokens=[600, 512, 1],
        output_tokens=[5, 6, 7],
    )
    notes = write(path, tmp_path / "out.jsonl", "mooncake")
    assert (tmp_path / "out.jsonl").read_text().splitlines()[2].startswith('{"timestamp":4052.000001,')
    assert [row["timestamp"] for row in lines(tmp_path / "out.jsonl")] == [0, 3000, 4052.000001]
    assert [len(row["hash_ids"]) for row in lines(tmp_path / "out.jsonl")] == [2, 1, 1]
    assert "3 rows without blocks that make up 512 tokens: they share no prefix" in notes


@pytest.mark.parametrize("name", ["conversation_trace.lines1-6788.jsonl", "synthetic_trace.lines1-2200.jsonl"])
@pytest.mark.data
def test_mooncake_comes_back_as_it_was(data, tmp_path, name):
    source = data("traces", "traces", "mooncake", name)
    before = table("mooncake", source)
    parquet.write(before, tmp_path / "in.parquet")
    write(tmp_path / "in.parquet", tmp_path / "out.jsonl", "mooncake")
    after = table("mooncake", tmp_path / "out.jsonl")
    for column in ("arrival_ns", "input_tokens", "output_tokens"):
        assert before[column].equals(after[column])
    renamed: dict[int, int] = {}
    for old, new in zip(before["block_hashes"].to_pylist(), after["block_hashes"].to_pylist(), strict=True):
        assert [renamed.setdefault(a, b) for a, b in zip(old, new, strict=True)] == new
    assert len(set(renamed.values())) == len(renamed)


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8))
def test_two_prompts_share_a_block_of_512_exactly_when_they_agree_up_to_its_end(prompts):
    blocks = Blocks()
    size = 64
    found = [blocks.of(len(prompt) * size, size, prompt) for prompt in prompts]
    for one, ids in zip(prompts, found, strict=True):
        assert len(ids) == -(-len(one) * size // 512)
        for other, other_ids in zip(prompts, found, strict=True):
            for at in range(min(len(ids), len(other_ids))):
                assert (ids[at] == other_ids[at]) == (one[: (at + 1) * 8] == other[: (at + 1) * 8])


def test_a_csv_reads_back_as_the_same_trace(tmp_path):
    path = trace(
        tmp_path,
        arrival_ns=[10**18, 10**18 + 1],
        tenant=["risk", 'sum, "mary"'],
        stream=[True, None],
        input_tokens=[600, None],
        output_tokens=[5, 6],
        first_token_ns=[None, 7],
        block_hashes=[[1], None],
    )
    write(path, tmp_path / "out.csv", "csv")
    back = table("csv", tmp_path / "out.csv")
    before = parquet.read(path).drop_columns(["block_hashes"])
    assert back.drop_columns(["outcome"]).to_pylist() == before.to_pylist()


def test_rows_without_lengths_are_left_out_of_mooncake_and_counted(tmp_path):
    path = trace(tmp_path, arrival_ns=[0, 1], input_tokens=[None, 4], output_tokens=[1, 1])
    assert "1 rows without lengths left out" in write(path, tmp_path / "out.jsonl", "mooncake")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["in.parquet", "-o", "out.txt"], "what format is out.txt"),
        (["in.parquet", "-o", "out.jsonl"], "has no output_tokens"),
        (["nothing.parquet", "-o", "out.csv"], "no such file"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, args, problem):
    monkeypatch.chdir(tmp_path)
    trace(tmp_path, arrival_ns=[0], input_tokens=[4])
    result = CliRunner().invoke(export, args)
    assert problem in (result.output + str(result.exception))
    assert [item.name for item in tmp_path.iterdir()] == ["in.parquet"]


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    path = trace(tmp_path, arrival_ns=[0], input_tokens=[4], output_tokens=[1])
    export.main([str(path), "-o", str(tmp_path / "out.jsonl")], standalone_mode=False)
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'out.jsonl'}\n"
    assert err == "1 rows\n1 rows without blocks that make up 512 tokens: they share no prefix\n"


def test_an_import_of_an_export_keeps_every_nanosecond(tmp_path):
    times = [0, 1, 999_999, 1_000_000, 123_456_789_012_345]
    path = trace(tmp_path, arrival_ns=times, input_tokens=[1] * 5, output_tokens=[1] * 5)
    write(path, tmp_path / "out.jsonl", "mooncake")
    assert table("mooncake", tmp_path / "out.jsonl", Options())["arrival_ns"].to_pylist() == times
