"""Which requests are evidence of what is hot, in both engines: those of people, alike as they may be with others."""

from __future__ import annotations

import pytest

from jumpstart.recorder import WarmSettings
from jumpstart_server.profiles import evidence
from jumpstart_warmup.corpus import CorpusRecorder
from jumpstart_warmup.observe import Observer
from tests.server import asgi_lab, wsgi_lab
from tests.server.lab import HELLO, BaseLab
from tests.server.raw_http import until

PEOPLE, PROBE, MARK = "User-Agent: Mozilla/5.0", "User-Agent: kube-probe/1.29", "X-Jumpstart-Warmup: 1"


@pytest.mark.parametrize("engine", ["wsgi", "asgi"])
def test_probes_and_marked_requests_are_none_whatever_they_ask_for(engine: str) -> None:
    corpus = CorpusRecorder(WarmSettings())
    observer = Observer(corpus)
    lab: BaseLab = (wsgi_lab.Lab if engine == "wsgi" else asgi_lab.Lab)(observer=observer)
    with lab, lab.connect() as client:
        lab.serve(HELLO, "/")
        for header in (PROBE, PROBE, PEOPLE, MARK, PEOPLE, PROBE, PEOPLE):
            client.get("/", header)
            assert client.response().status == 200
        until(lambda: observer.requests == 7)
        snapshot = observer.snapshot()
    assert {key: stats.requests for key, stats in evidence(snapshot).items()} == {"GET /": 3}
    assert {record.key: record.weight for record in corpus.capture("ship")} == {"GET /": 3}
