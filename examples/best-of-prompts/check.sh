#!/bin/sh
# The test: exits 0 if count.sh is right.
for want in "0 items" "1 item" "2 items"; do
	got=$(./count.sh "${want%% *}")
	if [ "$got" != "$want" ]; then
		echo "want '$want', got '$got'"
		exit 1
	fi
done
