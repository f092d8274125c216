"""What a call is given and returns: plain values, containers of them, and what tells calls apart."""
