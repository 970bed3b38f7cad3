#!/bin/sh
awk -F';' '{ s[$2] += $3 } END { for (n in s) print n, s[n] }' willow.txt | LC_ALL=C sort -k2,2nr -k1,1 > ranking.csv
