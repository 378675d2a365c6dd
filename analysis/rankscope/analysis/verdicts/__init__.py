"""From windows of ranks to a verdict: thresholds, rules, causes, sentences."""
