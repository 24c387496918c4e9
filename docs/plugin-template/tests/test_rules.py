"""The rule passes every check of evenhand's conformance kit, one test each, and trains."""

import pytest
import torch
from evenhand_smooth.rules import SmoothClip

import evenhand as eh


@pytest.mark.conformance(SmoothClip())
def test_smooth_clip(conformance):
    conformance()


def test_it_trains_by_its_name(tmp_path):
    train, test = eh.data.digits()
    run = eh.fit(
        torch.nn.Linear(64, 10), train, epsilon=3.0, method="smooth_clip", epochs=1, test=test, out=tmp_path / "run"
    )
    assert "of the package evenhand-smooth 0.1.0" in str(run.plan)
    assert eh.verify(tmp_path / "run")["ok"]
