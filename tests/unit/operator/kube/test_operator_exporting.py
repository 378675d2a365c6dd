from __future__ import annotations

from tools.operator_samples import scrape_operator


def test_the_operator_tells_what_it_holds_hears_and_writes() -> None:
    lines = scrape_operator().splitlines()
    assert "rankscope_operator_shards_held 2.0" in lines
    assert "rankscope_operator_daemons_connected 1.0" in lines
    assert "rankscope_operator_writes_waiting 2.0" in lines
    assert 'rankscope_operator_windows_refused_total{reason="rate"} 1.0' in lines
    assert 'rankscope_operator_reviews_total{result="allowed",webhook="inject"} 3.0' in lines
    assert 'rankscope_operator_api_calls_total{code="OK",method="StartCapture"} 4.0' in lines
