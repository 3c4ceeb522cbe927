"""Ways to keep fewer bytes of keys and values, at reference quality and with exact counts of bytes."""
