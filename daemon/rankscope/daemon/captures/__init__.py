"""Deep captures on demand: speaks libkineto's protocol to training processes, fetches what they write, and keeps it.

Everything that arrives here was written by a training container: datagrams, file names, files. None of it is trusted,
and nothing that is sent may harm the process it goes to."""
