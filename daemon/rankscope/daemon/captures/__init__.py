"""Deep captures on demand: libkineto's protocol, fetching and storing traces.

Training containers write everything that arrives here: datagrams, file names, files. None of it is trusted, and
nothing that is sent may harm the receiving process."""
