"""From behaviour histories to the sequence that attention reads: merged, masked, cut to the newest, or coarser."""
