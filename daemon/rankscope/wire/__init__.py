"""Listening on a network, for daemon and operator alike: whoever is slow, silent or loud keeps nobody else from being
heard. Standard library only; knows neither of the two, nor what is served."""
