"""What the README shows is run as it stands there."""

import re
import sys
from pathlib import Path

import train

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_readmes_environment_trains(tmp_path, tiny_folder, monkeypatch):
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Shout" in block]
    (tmp_path / "my_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("my_module", None)
    assert train.main([f"log.dir={tmp_path}", f"model.name={tiny_folder}", "env.name=my_module:Shout", "env.words=5",
                       "train.steps=1", "train.prompts_per_step=2", "train.group_size=4", "sampler.max_new_tokens=8",
                       "log.name=shout"]) == 0
    assert "reward/loud" in (tmp_path / "shout" / "metrics.jsonl").read_text()


def test_every_file_in_the_map_is_there():
    table = README.split("## Map")[1].split("## ")[0]
    names = re.findall(r"`([\w./*]+)`", table)
    assert len(names) > 10
    for name in names:
        assert list(Path(train.__file__).parent.glob(name.rstrip("/"))), name
