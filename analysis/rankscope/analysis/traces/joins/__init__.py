"""What the traces of many ranks say together: one clock, who came last, who is slow; and one trace of all of them."""
