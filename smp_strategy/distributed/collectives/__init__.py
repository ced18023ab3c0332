"""Collectives of flat buffers: gather, reduce-scatter and all-reduce by the best way of the ranks' links."""
