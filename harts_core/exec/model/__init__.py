"""The hybrid model: KDA and MLA attention, dense and expert feed-forward layers."""
