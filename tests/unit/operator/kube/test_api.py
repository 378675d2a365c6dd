from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.operator.kube.api import Api, ClusterError


@pytest.mark.parametrize("text", ["not: [yaml", "scalar", "[1, 2]", "clusters: 5", ""])
def test_a_kubeconfig_that_cannot_be_read_is_told_in_one_line_with_the_next_step(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"\Acannot reach a cluster: .*; name a --kubeconfig, or run in a pod\Z"):
        Api(path)
