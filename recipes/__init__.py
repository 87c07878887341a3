"""Runnable examples on real data: networks, Lightning modules, data modules and the two scripts that use them."""
