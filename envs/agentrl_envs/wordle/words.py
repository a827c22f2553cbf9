"""Common English words of four, five and six letters."""

from __future__ import annotations

_FOUR = """
able acid aged also area army away baby back ball band bank base bath bear beat been beer bell belt best bird bite
blow blue boat body bomb bond bone book boot born boss both bowl bulk burn bush busy cake call calm came camp card
care case cash cast cell chat chip city club coal coat code cold come cook cool cope copy core corn cost crew crop
dark data date dawn days dead deal dear debt deep desk dial diet dirt disc dish dock does done door dose down draw
drop drum dual duke dust duty each earn ease east easy edge else even ever exit face fact fail fair fall farm
fast fear feed feel fell file fill film find fine fire firm fish five flag flat flow folk food foot form fort four
free from fuel full fund gain game gate gave gear gift girl give glad goal goat gold golf gone good gray grew grid
grow gulf hair half hall hand hard harm have head hear heat help herb here hero hide high hill hire hold hole holy
home hope host hour huge hunt hurt idea inch into iron item join joke jump jury just keen keep kick kind king knee
knew know lack lady lake lamp land lane last late lazy lead leaf lean left lend less life lift like line link lion
list live loan lock long look lord lose loss loud love luck lung made mail main make male many mark mask mass meal
mean meat meet menu mile milk mill mind mine miss mode mood moon more most move much must name navy near neck need
nest news next nice nine none nose note okay once only onto open oral oven over pace pack page paid pain pair palm
park part pass past path peak pick pile pine pink pipe plan play plot plug plus poem poet pole poll pond pool poor
port post pour pull pure push quit race rail rain rank rare rate read real rear rely rent rest rice rich ride ring
rise risk road rock role roll roof room root rope rose rule rush safe sail salt same sand save seat seed seek seem
self sell send ship shoe shop shot show shut sick side sign silk sing site size skin slow snow soap soft soil sold
some song soon sort soul soup spin spot star stay stem step stop such suit sure swim tail take tale talk tall tank
tape task team tell tent term test text than that them then they thin this tide till time tiny toll tone tool
tour town tree trip true tube tune turn twin type unit upon used user vary vast very view vote wage wait wake walk
wall want warm wash wave weak wear week well went were west what when wide wife wild will wind wine wing wire wise
wish with wolf wood wool word work worm yard yarn year your zero zone
"""

_FIVE = """
about above actor acute adapt admit adopt adult after again agent agree ahead alarm album alert alike alive allow
alone along alter amber among angel anger angle angry ankle apart apple apply arena argue arise armor arrow aside
asset audio avoid awake award aware bacon badge baker basic basin beach beard beast begin being below bench berry
birth black blade blame blank blast blaze bleed blend bless blind block blood board boast bonus boost booth bound
brain brand brass brave bread break brick bride brief bring broad broke brown brush build bunch burst cabin cable
camel canal candy cargo carry carve catch cause chain chair chalk charm chart chase cheap check cheek cheer chess
chest chief child choir chose civil claim class clean clear clerk click cliff climb cloak clock close cloth cloud
coach coast color comet coral couch count court cover crack craft crane crash cream crime crisp cross crowd crown
crush curve cycle daily dairy dance death debut delay depth diary dirty doubt dozen draft drain drama dream dress
drift drill drink drive eager eagle early earth eight elbow elder elect empty enemy enjoy enter entry equal error
event every exact exist extra fable faith false fancy fault favor feast fence fever fiber field fifth fifty fight
final flame flash fleet flesh float flood floor flour fluid flute focus force forge forty forum found frame fresh
front frost fruit funny ghost giant glass globe glory glove grace grade grain grand grant grape graph grass grave
great green greet grief group grove guard guess guest guide habit happy harsh haste hatch heart heavy hedge hello
honey honor horse hotel house human humor ideal image inner input ivory jelly jewel joint judge juice knife knock
label labor large laser later laugh layer learn lease least leave lemon level light limit linen liver local logic
loose lover lower loyal lucky lunch magic major maker maple march match maybe mayor medal media melon mercy merit
metal meter minor mixed model money month moral motor mount mouse mouth movie music naive naval nerve never night
noble noise north novel nurse ocean offer often olive onion opera orbit order other ought outer owner paint panel
panic paper party pasta patch pause peace peach pearl penny phase phone photo piano piece pilot pitch pizza place
plain plane plant plate point polar pound power press price pride prime print prize proof proud pulse punch pupil
queen quest quick quiet quite quote radar radio raise ranch range rapid ratio reach react ready realm rebel refer
relax reply rider ridge rifle right rigid rival river roast robin robot rough round route royal rural salad sauce
scale scarf scene scent scope score scout sense serve seven shade shake shape share sharp sheep sheet shelf shell
shift shine shirt shock shore short shout sight silly skill skirt slate sleep slice slide slope small smart smell
smile smoke snake solar solid solve sound south space spare spark speak speed spend spice spike spine split spoon
sport spray squad stack staff stage stair stake stamp stand start state steam steel steep stick still stock stone
store storm story stove strap straw strip study style sugar suite sunny super surge swamp swear sweep sweet swift
swing sword table taste teach tempo thank theme thick thief thing think third throw thumb tiger tight title toast
today token topic total touch tough tower trace track trade trail train treat trend trial tribe trick troop truck
truly trunk trust truth tulip uncle under union unity until upper upset urban usage usual valid value vapor video
villa viola virus visit vital vivid vocal voice voter wagon waist waste watch water weave wedge whale wheat wheel
where which while white whole width woman world worry worth wound wrist write wrong yacht yield young youth zebra
"""

_SIX = """
absent accept access across action active actual advice affair afford afraid agency agenda almost always amount animal
annual answer anyone appeal appear arctic around arrest arrive artist asleep aspect assist assume attack attend author
autumn bakery ballet banana banker barely barrel basket battle beauty become before behalf behave behind belief belong
beside better beyond bishop bitter border bottle bottom branch breath breeze bridge bright broken bronze bubble
bucket budget burden bureau butter button camera cancel candle canvas carbon career carpet castle casual cattle center
chance change charge cheese choice choose church circle clever client closet coffee column combat comedy common corner
cotton county couple course cousin create credit crisis custom damage danger decade decide defeat defend degree demand
depend desert design desire detail device dinner direct divide doctor dollar domain donkey double dragon driver during
easily editor effect effort eighth either eleven emerge empire employ enable ending energy engage engine enough ensure
entire equity escape estate ethnic evolve exceed expand expect expert export extend fabric facial factor fairly family
famous farmer father fellow female figure filter finger finish fiscal flavor flight flower follow forest forget formal
former fourth freeze friend frozen future galaxy gallon garage garden garlic gather gentle glance global golden grocer
ground growth guitar hammer handle happen harbor hardly height helmet hidden honest horror hunger hunter impact import
income indeed infant inform injury insect inside intend invent invest island itself jacket jersey joyful jungle junior
kettle kidney kitten ladder lately latter launch lawyer leader league legend lesson letter likely liquid listen little
living locate lovely luxury magnet mainly manage manner marble margin marine market master matter meadow medium member
memory mental merely method middle mirror mobile modern modest moment monkey mostly mother motion murder muscle museum
mutual myself narrow nation native nature nearby nearly needle nephew nobody normal notice number object obtain office
online option orange origin outfit output oxygen packet palace parade parent partly patent people pepper period permit
person phrase pickle pillow planet plenty pocket poetry police policy polite powder prefer pretty priest prince prison
profit proper public pursue puzzle rabbit random rarely rather reason recall recent recipe record reduce reform refuse
region relate relief remain remind remote remove repair repeat report rescue resist resort result retail retire return
reveal review reward ribbon rocket rubber sailor salmon sample school screen script search season second secret sector
secure select senior series settle severe shadow shield should shower signal silent silver simple singer single sister
slight smooth soccer social source speech spider spirit spread spring square stable statue steady stolen stream street
stress strict strike string strong studio submit sudden suffer summer supply surely survey switch symbol system tackle
talent target temple tenant tender tennis thanks theory thirty thread threat throat ticket timber tissue tongue toward
travel treaty trophy tunnel turkey turtle twelve twenty unable unique unless update useful valley velvet vendor vessel
victim violet vision visual volume walnut wealth weapon weekly weight window winner winter wisdom wonder wooden worker
writer yellow zipper
"""

WORDS: dict[int, tuple[str, ...]] = {
    length: tuple(sorted({word for word in text.split() if len(word) == length}))
    for length, text in ((4, _FOUR), (5, _FIVE), (6, _SIX))
}
"""By their number of letters, in alphabetical order."""
