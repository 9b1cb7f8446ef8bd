"""The hooks by themselves: what they hold on to, and what they say of a mitmproxy that holds on to more."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what mitmproxy itself imports
    from mitmproxy.test import tflow

    from capture import addon as hooks
    from capture.addon import Capture
    from capture.proxy import chain
from capture.exchange import Answer
from capture.recorder import Recorder, prepared
from capture.settings import Settings
from capture.voice import speak


@pytest.fixture
def addon(tmp_path):
    settings = prepared(Settings(out=str(tmp_path / "out")))
    return Capture(settings, Recorder(settings, lambda _text: None))


def asked():
    flow = tflow.tflow(resp=True)
    flow.request.method, flow.request.path = "POST", "/v1/chat/completions"
    return flow


@pytest.mark.parametrize("end", ["response", "error"])
def test_g06_nothing_keeps_a_flow_after_its_row(addon, end):
    flow = asked()
    flow.error = tflow.terr() if end == "error" else None
    addon.requestheaders(flow)
    addon.request(flow)
    addon.responseheaders(flow)
    getattr(addon, end)(flow)
    gone = weakref.ref(flow)
    del flow
    gc.collect()
    assert gone() is None
    assert len(addon.recorder._queue) == 1


def test_g03_the_end_is_told_twice_and_is_one_row(addon):
    flow = asked()
    addon.request(flow)
    addon.responseheaders(flow)
    assert flow.response.stream(b"data: {}\n\n") == b"data: {}\n\n", "untouched"
    assert flow.response.stream(b"") == b"", "mitmproxy calls once more at the end"
    addon.response(flow)
    addon.error(flow)
    assert len(addon.recorder._queue) == 1


@pytest.mark.parametrize(("loaded", "said"), [({}, ""), ({"view": object()}, "keeps every flow in memory")])
def test_g06_a_mitmproxy_that_keeps_every_flow_in_memory_is_said(addon, loaded, said, monkeypatch, capfd):
    master = SimpleNamespace(addons=loaded)
    monkeypatch.setattr(hooks, "ctx", SimpleNamespace(master=master))
    addon.running()
    assert speak.rest(5.0)
    heard = capfd.readouterr().err
    assert said in heard
    assert bool(heard) == bool(said)


def test_g06_the_command_itself_loads_nothing_that_keeps_flows():
    assert not {"View", "Save", "EventStore", "ClientPlayback"} & {type(each).__name__ for each in chain()}


def test_what_is_kept_of_an_answer_for_the_tokenizer_has_an_end():
    answer = Answer(200, [], limit=10)
    assert [answer.add(b"12345"), answer.add(b"12345"), answer.add(b"1"), answer.add(b"1")] == [5, 5, -10, 0]
    assert answer.tokens("chat", list, stream=True) is None
    assert (answer.size, answer.pieces, answer.let_go()) == (0, None, 0)
